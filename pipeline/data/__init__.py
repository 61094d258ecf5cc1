"""Rows of files -> validated, templated, tokenized Arrow blocks, made once by Ray Data and fed to a trainer.

A row passes through the files in this order:

    files, chunks            the files of a job -> chunks that tasks read
    text_rows, table_rows    a chunk of JSON Lines, a JSON array, CSV, Parquet or Arrow -> decoded rows with their numbers
    preview, reshape         what the job makes of a decoded row: its function, its names of columns, the side that a label picks
    shapes, messages         a row of any accepted shape -> a Record
    template, encode         Record -> text -> token ids
    tasks, counts            a task: one chunk -> one Arrow file of token rows, and counts
    report                   the counts of all tasks -> the report, or an error
    read                     the driver: starts the tasks, or takes the parts from the cache
    feed                     token tables -> a trainer
"""
