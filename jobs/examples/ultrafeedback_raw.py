"""Converts rows of UltraFeedback, {instruction, completions: [{response, fine-grained_score, ...}]}, into pairs."""

SCORE = "fine-grained_score"  # the mean of four ratings; overall_score has known errors


def pair(row):
    rated = [one for one in row["completions"] if one.get(SCORE) is not None]
    ranked = sorted(rated, key=lambda one: one[SCORE])
    if not ranked or ranked[0][SCORE] == ranked[-1][SCORE]:
        return None
    return {"prompt": row["instruction"], "chosen": ranked[-1]["response"], "rejected": ranked[0]["response"]}
