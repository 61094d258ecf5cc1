"""The formats of files of rows: a file, or a part of it -> its rows with their numbers, decoded, as JSON would have them."""
