"""Converts positive reviews of IMDB into demonstrations, which continue the first words of a review.

Rows are {review, sentiment} (the CSV file) or {text, label} (stanfordnlp/imdb).
"""


def continued(row):
    if row.get("sentiment", row.get("label")) not in ("positive", 1, "1"):
        return None
    words = row.get("review", row.get("text")).replace("<br />", " ").split()
    return {"prompt": " ".join(words[:8]), "completion": " " + " ".join(words[8:])}
