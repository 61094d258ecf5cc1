"""Reads and checks the rows of a job, and tokenizes them once into Arrow tables.

The modules process the rows in this order:

    files, chunks            the files of a job are cut into chunks, one for each task
    text_rows, table_rows    a chunk of JSON Lines, a JSON array, CSV, Parquet or Arrow becomes decoded, numbered rows
    preview                  the first rows of each file are checked before any row is tokenized
    reshape, labels          the job's function, column names and label rule are applied to a row
    formats, messages        a row of any supported format becomes a Record
    template, encode         a Record becomes text, then token ids
    tasks, counts            a task writes one Arrow file of token rows, and counts them
    report                   the counts of all tasks become a report, or an error
    read                     the driver starts the tasks, or loads the token rows from the cache
    mixture                  weighted sources become the rows of an epoch
"""
