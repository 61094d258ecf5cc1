"""Prompts, and the columns that go to a Python reward with them."""

import json

from toy_data import PREFERENCES, USER, parsed


def test_prompts_carry_their_further_columns():
    record = parsed({"prompt": "what?", "gold": 4}, "ppo")
    assert json.loads(record.row) == {"prompt": "what?", "gold": 4}
    assert parsed({"prompt": "\n\nHuman: hi\n\nAssistant:"}, "ppo").prompt == [USER]
    assert parsed(PREFERENCES[4], "ppo").prompt == [USER]
    assert parsed({"messages": [USER]}, "evaluate").prompt == [USER]
