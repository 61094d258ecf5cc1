"""Reads the rows of a job, checks them, and tokenizes them once. The results are Arrow tables.

A row passes through the files in this order:

    files, chunks            the files of a job are cut into chunks, one for each task
    text_rows, table_rows    a chunk of JSON Lines, a JSON array, CSV, Parquet or Arrow becomes decoded, numbered rows
    preview                  the first rows of each file are checked before any row is tokenized
    reshape, labels          the job's function, column names and label rule are applied to a row
    formats, messages        a row of any supported format becomes a Record
    template, encode         a Record becomes text, then token ids
    tasks, counts            a task writes one Arrow file of token rows, and counts them
    report                   the counts of all tasks become a report, or an error
    read                     the driver starts the tasks, or takes their files from the cache
    mixture                  weighted sources become the rows of an epoch
"""
