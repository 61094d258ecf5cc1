"""Red-team dialogues, {transcript, rating}, as thumbs on their last answer."""


def resisted(row):
    if row["rating"] is None or row["rating"] == 2:
        return None
    return {"messages": row["transcript"], "label": row["rating"] < 2}
