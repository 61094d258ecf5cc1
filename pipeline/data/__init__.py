"""Rows of files -> validated, templated, tokenised Arrow blocks, made once by Ray Data and fed to a trainer.

A row passes through the files in this order:

    files, chunks                           the files of a job -> chunks that tasks read
    formats: lines | array | delimited |    a chunk of JSON Lines, a JSON array, CSV, or Parquet and Arrow -> decoded rows with
      tables, gunzip                          their numbers
    lookahead, reshape                      what the job makes of a decoded row: its function, its names of columns, the side
                                              that a label picks
    shapes, values, messages                a row of any accepted shape -> a Record (record.py)
    template, encode                        Record -> text -> token ids
    tasks                                   a Ray Data task: one chunk -> one parquet file of token rows, and counts
    merge, refusals, report                 the counts of all tasks -> the report, or an error
    read, cache                             the driver: starts the tasks, or takes the parts from the cache
    feed                                    token tables -> a trainer
"""
