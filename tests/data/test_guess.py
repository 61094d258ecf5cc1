"""Tests which `data.columns` are suggested for the columns of a file, and for which stages."""

import pytest

from pipeline.data import guess
from pipeline.data.annotations import flatten_annotation
from pipeline.data.formats import kind_of

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
OTHER = [CHAT[0], {"role": "assistant", "content": "What?"}]


def guessed(rows, stage):
    return guess.guess_columns(rows, kind_of(stage))


def misfit(rows, stage, file):
    return guess.explain_misfit(rows, kind_of(stage), file)


def reads(rows, columns, stage):
    return guess.reads_most_rows(rows, columns, kind_of(stage))


def rows(**columns):
    """Returns eight rows. The row number replaces {} in a text. The rows cycle through the values of a tuple."""

    def value(one, i):
        return one[i % len(one)] if isinstance(one, tuple) else one.format(i) if isinstance(one, str) else one

    return [{name: value(one, i) for name, one in columns.items()} for i in range(8)]


SETS = {
    "alpaca": rows(instruction="Give tip {}.", input="", output="Eat well, please."),
    "openhermes": rows(id="x{}", system_prompt="", question="Why is {} so?", response="It just is."),
    "sharegpt": rows(id="{}", conversation=[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]),
    "stack": rows(qid=1, question="How do I {}?", date="2016/01/01", metadata=["https://a"], response_j="Like this.", response_k="Like that."),
    "llmbar": rows(input="Name {} things.", output_1="One, two.", output_2="No, thanks.", label=(1, 2)),
    "pandalm": rows(idx=1, instruction="Do {} now.", input="", response1="Done it.", response2="Not done.", annotator1=(0, 1, 2), annotator2=(1, 2), annotator3=(1, 2)),
    "shp": rows(post_id="k{}", history="A post {} here.", human_ref_A="One comment.", human_ref_B="Another one.", score_A=(3, 8), score_B=5, labels=(0, 1), seconds_difference=1.0),
    "webgpt": rows(question={"id": "1", "full_text": "Why is it so?"}, answer_0="Because of it.", answer_1="No idea why.", score_0=(0.5, -0.5), score_1=(-0.5, 0.5)),
    "arena": rows(model_a="gpt", model_b="claude", winner=("model_a", "model_b", "tie"), conversation_a=CHAT, conversation_b=OTHER),
    "hh": rows(chosen="\n\nHuman: hi {}\n\nAssistant: Yes.", rejected="\n\nHuman: hi {}\n\nAssistant: No."),
    "ultrafeedback": rows(prompt="hi", chosen=CHAT, rejected=OTHER, messages=CHAT, score_chosen=8.0, score_rejected=2.0),
    "imdb": rows(review="A film number {} that I saw.", sentiment=("positive", "negative")),
    "feedback": rows(question="Say {} now.", answer="As you wish.", thumb=("up", "down")),
    "red_team": rows(transcript="\n\nHuman: hi {}\n\nAssistant: Yes.", rating=(0.0, 3.0), task_description="I tried {} times."),
    "numbers": rows(x=1, y=(2, 3)),
    "lmsys": rows(id=1, model_a="gpt", model_b="pi", prompt="Do {} now.", response_a="Done it.", response_b="Not done.", winner_model_a=(1, 0, 0), winner_model_b=(0, 1, 0), winner_tie=(0, 0, 1)),
    "openai": rows(input={"messages": CHAT[:1], "tools": [], "parallel_tool_calls": True}, non_preferred_output=[OTHER[1]], preferred_output=[CHAT[1]]),
    "summarize": rows(info={"id": "t3", "post": "A long post here.", "title": "A title"}, summaries=[{"text": "One of them.", "policy": "sup1"}, {"text": "Another one.", "policy": "ref"}], choice=(0, 1), worker="w"),
    "shop": rows(**{"customer question": "Where is {}?", "good reply": "On its way.", "bad reply": "No idea at all.", "agent": ("ann", "bob")}),
    "ratings": rows(prompt="Say {} now.", response="As you wish.", rating=(1, 2, 3, 4, 5)),
    "ratings with typing errors": rows(prompt="Say {} now.", response="As you wish.", stars=(1, 2, "1,5", "three", 4, 5, "no idea at all")),
    "annotators": rows(prompt="Say {} now.", completion="As you wish.", id=(7, 8), rating_anna=("1.0", "5.0", "NaN"), rating_ben=(2, 4), rating_carl=("", 3, 3), rating_by=("x", "y")),
    "a rating and its parts": rows(prompt="Say {} now.", completion="As you wish.", rating_tone=(1, 2), score=(3, 4), rating=(1, 3)),
    "twins": rows(prompt="Say {} now.", reply_1="As you wish.", reply_2="Oh no, never."),
    "sheet": rows(customer_message="Where is {}?", reply_a="On its way.", reply_b="No idea at all.", anna=("A", "B", "tie"), ben=("a ", "B", "")),
    "form": rows(**{"Question": "Why {}?", "Answer A": "So {}.", "Answer B": "Not so.", "Which answer is better?": ("A is slightly better", "Both bad")}),
    "votes in a list": rows(prompt="Say {} now.", reply_1="As you wish.", reply_2="Oh no, never.", best=(["reply_1", "reply_2"], ["reply_2"], None)),
    "a question about a text": rows(context="Old text {}.", question="Why {}?", answer="So it is."),
    "a solution with a short answer": rows(problem="What is {} plus 1?", solution="First {}. Then one.", answer="{}"),
    "yes or no": rows(prompt="Is {} even, please?", answer=("yes", "no")),
    "a log with nested feedback": rows(query="Say {} now.", answer="As you wish.", feedback=({"rating": "like"}, {"rating": "dislike"}, None)),
    "a survey that few answered": rows(question="Say {} now.", reply="As you wish.", satisfaction=("Offered", "Offered", "Good", "Bad")),
    "a message a row": rows(conversation_id="{}", role=("user", "assistant"), text="Say {} now."),
}  # fmt: skip
GOOD = " and data.label='{good: VALUE, bad: VALUE}' with the values of the column"
FIRST = GOOD.replace("good", "first").replace("bad", "second")
FITS = {
    "alpaca": "sft and ppo as they are",
    "openhermes": "sft with data.columns='{prompt: question, completion: response}'; ppo with data.columns='{prompt: question}'",
    "sharegpt": "sft with data.columns='{messages: conversation}'",
    "stack": "rm, dpo and kto with data.columns='{prompt: question, chosen: response_j, rejected: response_k}'; "
    "ppo with data.columns='{prompt: question}'",
    "llmbar": "rm, dpo and kto with data.columns='{prompt: input, first: output_1, second: output_2}'; ppo with data.columns='{prompt: input}'",
    "pandalm": "rm, dpo and kto with data.columns='{first: response1, second: response2, label: [annotator1, annotator2, annotator3]}'" + FIRST + "; ppo as they are",
    "shp": "rm, dpo and kto with data.columns='{prompt: history, first: human_ref_A, second: human_ref_B, first_score: score_A, second_score: score_B}'; "
    "ppo with data.columns='{prompt: history}'",
    "webgpt": "rm, dpo and kto with data.columns='{prompt: question.full_text, first: answer_0, second: answer_1, first_score: score_0, second_score: score_1}'; "
    "ppo with data.columns='{prompt: question.full_text}'",
    "arena": "rm, dpo and kto with data.columns='{first: conversation_a, second: conversation_b, label: winner}'",
    "hh": "rm, dpo, kto and ppo as they are",
    "ultrafeedback": "sft, rm, dpo, kto and ppo as they are",
    "imdb": "ppo with data.columns='{prompt: review}'",
    "feedback": "sft and kto with data.columns='{prompt: question, completion: answer, label: thumb}'; ppo with data.columns='{prompt: question}'",
    "red_team": "sft and kto with data.columns='{messages: transcript, label: rating}'"+GOOD,
    "numbers": "",
    "lmsys": "rm, dpo and kto with data.columns='{first: response_a, second: response_b, first_score: winner_model_a, second_score: winner_model_b}'; "
    "ppo as they are",
    "openai": "rm, dpo and kto with data.columns='{prompt: input.messages, chosen: preferred_output, rejected: non_preferred_output}'; "
    "ppo with data.columns='{prompt: input.messages}'",
    "summarize": "rm, dpo and kto with data.columns='{prompt: info.post, first: summaries.0.text, second: summaries.1.text, label: choice}'" + FIRST + "; "
    "ppo with data.columns='{prompt: info.post}'",
    "shop": "rm, dpo and kto with data.columns='{prompt: customer question, chosen: good reply, rejected: bad reply}'; "
    "ppo with data.columns='{prompt: customer question}'",
    "ratings": "sft and kto with data.columns='{completion: response, label: rating}'" + GOOD + "; ppo as they are",
    "ratings with typing errors": "sft and kto with data.columns='{completion: response, label: stars}'" + GOOD + "; ppo as they are",
    "annotators": "sft and kto with data.columns='{label: [rating_anna, rating_ben, rating_carl]}'" + GOOD + "; ppo as they are",
    "a rating and its parts": "sft and kto with data.columns='{label: rating}'" + GOOD + "; ppo as they are",
    "twins": "ppo as they are",
    "sheet": "rm, dpo and kto with data.columns='{prompt: customer_message, first: reply_a, second: reply_b, label: [anna, ben]}'",
    "form": "rm, dpo and kto with data.columns=\"{prompt: Question, first: Answer A, second: Answer B, label: 'Which answer is better?'}\"" + FIRST + "; ppo with data.columns='{prompt: Question}'",
    "votes in a list": "rm, dpo and kto with data.columns='{first: reply_1, second: reply_2, label: best}'; ppo as they are",
    "a question about a text": "sft with data.columns='{instruction: question, input: context, output: answer}'; "
    "ppo with data.columns='{instruction: question, input: context}'",
    "a solution with a short answer": "sft with data.columns='{prompt: problem, completion: solution}'; ppo with data.columns='{prompt: problem}'",
    "yes or no": "sft and ppo as they are",
    "a log with nested feedback": "sft and kto with data.columns='{prompt: query, completion: answer, label: feedback.rating}'; "
    "ppo with data.columns='{prompt: query}'",
    "a survey that few answered": "sft and kto with data.columns='{prompt: question, completion: reply, label: satisfaction}'" + GOOD + "; ppo with data.columns='{prompt: question}'",
    "a message a row": "",
}  # fmt: skip


def test_rows_of_the_right_format_get_the_error_of_the_first_row():
    parts = [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "5"}]
    made = rows(messages=[CHAT[0], {"role": "assistant", "content": parts}])
    line = misfit(made, "sft", "a.jsonl")
    assert line.startswith("a.jsonl:1: `messages[1].content[0]`: found a message part of type")
    assert "thoughts belong in `reasoning_content`" in line


def asked(**answers):
    """Returns Argilla records with a prompt, a response, and the annotators' answers."""
    given = {}
    for name, answer in answers.items():
        given |= {f"{name}.responses": answer, f"{name}.responses.status": ["submitted"] * len(answer)}
    return [
        flatten_annotation({"prompt": f"Say {i} now.", "response": "No idea.", **given}) for i in range(8)
    ]


@pytest.mark.parametrize("ratings", [[1, 2, 1], [2], [1, 2, "1,5"]])
def test_ratings_of_annotators_are_a_label_for_any_name_of_the_question(ratings):
    made = asked(quality=ratings)
    for stage in ("sft", "kto"):
        columns = guessed(made, stage)
        assert columns == {"completion": "response", "label": "quality"}
        assert not guess.is_clear(columns, made)


def test_a_text_of_annotators_in_addition_to_the_completion_needs_a_setting():
    made = asked(corrected=["A tube is 8 euros."])
    assert guessed(made, "sft") is None
    line = misfit(made, "sft", "a.jsonl")
    assert line.endswith("set data.columns='{prompt: COLUMN, completion: corrected}'")
    assert reads(made, {"completion": "corrected"}, "sft")
    written = [
        flatten_annotation(
            {"prompt": "Say it.", "reply.responses": ["Like this."], "reply.responses.status": ["submitted"]}
        )
    ]
    assert guessed(written, "sft") == {"completion": "reply"}


@pytest.mark.parametrize("names", [("thumbs_up", "thumbs_down"), ("likes", "dislikes"), ("thumbs_down",)])
def test_a_column_that_marks_bad_completions_needs_a_setting(names):
    made = rows(question="Say {} now.", answer="As you wish.", **dict.fromkeys(names, (0, 1, 0)))
    assert guessed(made, "sft") is guessed(made, "kto") is None
    assert guessed(made, "ppo") == {"prompt": "question"}
    line = misfit(made, "kto", "a.jsonl")
    assert f"set data.columns='{{label: {names[-1]}}}' and data.label='{{good: 0, bad: 1}}'" in line
    assert line.endswith("or create one label column with data.transform")


def test_the_values_of_a_column_that_marks_bad_completions_are_named():
    made = rows(prompt="Say {} now.", completion="As you wish.", harmful=("no", "yes"))
    assert guessed(made, "sft") is None
    assert """data.label="{good: 'no', bad: 'yes'}\"""" in misfit(made, "sft", "a.jsonl")


def test_two_texts_that_may_be_the_completion_need_a_setting():
    made = rows(question="Say {} now.", bot_answer="No idea.", corrected_answer=("As you wish.", ""))
    assert guessed(made, "sft") is None
    line = misfit(made, "sft", "a.jsonl")
    assert "`bot_answer` and `corrected_answer` could be the completion to train on" in line
    given = {"prompt": "question", "completion": "corrected_answer"}
    assert guess.unread_label_note(made, given, {*given.values()}, "data") == ""
    assert guessed([{**row, "prompt": "a", "completion": "b"} for row in made], "sft") == {}


@pytest.mark.parametrize("name", SETS)
def test_every_stage_that_the_rows_fit(name):
    assert guess.fitting_stages(SETS[name]) == FITS[name]


def test_the_error_is_one_line_and_ends_in_the_setting_to_use():
    line = misfit(SETS["openhermes"], "sft", "my/rows.jsonl")
    columns = "the columns are id, system_prompt, question, response"
    assert line.startswith(f"my/rows.jsonl: rows 1-8 match no format of `sft`; {columns}")
    assert line.endswith("; set data.columns='{prompt: question, completion: response}'") and "\n" not in line
    line = misfit(SETS["hh"], "sft", "hh.jsonl")
    assert line.endswith("; these rows can train rm, dpo, kto and ppo as they are")
    line = misfit(SETS["numbers"], "rm", "n.jsonl")
    ways = (
        "{prompt: COLUMN, chosen: COLUMN, rejected: COLUMN}",
        "{prompt: COLUMN, first: COLUMN, second: COLUMN, label: COLUMN}",
    )
    assert " or ".join(f"data.columns='{way}'" for way in ways) in line
    assert line.endswith("data.transform=python:MODULE:FUNCTION")
    line = misfit(rows(text="### Human: {}? ### Assistant: It is."), "sft", "guanaco.jsonl")
    assert "ppo" not in line and "set data.columns='{prompt: COLUMN, completion: COLUMN}', or" in line
    line = misfit([{"version": 1, "data": [{"prompt": "a", "completion": "b"}]}], "sft", "nested.json")
    assert line.endswith(
        "the columns are version, data; if the rows are in `data`, run jq -c '.data[]' FILE > NEW"
    )
    for stage in ("evaluate", "benchmarks", "pairs"):
        assert "match no format of" in misfit(SETS["stack"], stage, "n.jsonl")


@pytest.mark.parametrize("names", [("rank_a", "rank_b"), ("tokens_1", "tokens_2")])
def test_ranks_and_lengths_are_no_scores(names):
    rows = [
        {"question": f"What is {n}, please?", "answer_a": f"{n} it is.", "answer_b": f"It may be {n}.", names[0]: 1 + n % 2, names[1]: 2 - n % 2}
        for n in range(20)
    ]  # fmt: skip
    assert guessed(rows, "rm") is None


def test_several_texts_are_a_conversation_only_if_their_names_say_so():
    assert guessed(rows(data=["Why is it?", "It is so."]), "sft") == {"messages": "data"}
    assert guessed(rows(responses=["Why is it?", "It is so."]), "sft") is None


def test_unlabeled_rows_do_not_confirm_a_guess():
    made = rows(question="Say {} now.", answer="As you wish.", feedback=(None, None, None, "up"))
    made += rows(question="Say {} then.", answer="As you wish.", feedback=(None, None, None, "down"))
    full = {"prompt": "question", "completion": "answer", "label": "feedback"}
    assert guessed(made, "kto") == full
    assert not reads(made, {"label": "feedback"}, "kto")


def test_rows_of_one_message_each_are_recognized():
    said = misfit(SETS["a message a row"], "sft", "log.csv")
    assert said.endswith("combine the rows into conversations with data.group_by=COLUMN and data.transform")
