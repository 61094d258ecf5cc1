"""IMDB's rows, {review, sentiment}, as demonstrations: the first words of a positive review, and how it goes on."""


def continued(row):
    if row["sentiment"] != "positive":
        return None
    words = row["review"].replace("<br />", " ").split()
    return {"prompt": " ".join(words[:8]), "completion": " " + " ".join(words[8:])}
