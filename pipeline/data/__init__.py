"""Reads rows from files, validates, templates and tokenizes them once, and feeds the Arrow blocks to a trainer.

A row passes through the files in this order:

    files, chunks            the files of a job -> chunks that tasks read
    text_rows, table_rows    a chunk of JSON Lines, a JSON array, CSV, Parquet or Arrow -> decoded rows with their numbers
    preview, reshape         a decoded row -> a row changed by the job's function, column names and label rule
    shapes, messages         a row of any accepted format -> a Record
    template, encode         Record -> text -> token ids
    tasks, counts            a task: one chunk -> one Arrow file of token rows, and counts
    report                   the counts of all tasks -> the report, or an error
    read                     the driver: starts the tasks, or takes the parts from the cache
    feed                     token tables -> a trainer
"""
