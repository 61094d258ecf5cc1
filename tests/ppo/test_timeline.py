"""The timeline of an update: which update it shows, and what of it."""

import toy_ppo as toy

from pipeline.ppo.clock import Span, Timeline, typical


def update(number, begin, seconds, *others):
    half = begin + seconds / 2
    own = [Span("trainer", "rollout", begin, half), Span("trainer", "update", half, begin + seconds)]
    return Timeline(number, [*own, *others])


def test_the_update_of_median_length_is_shown_and_of_others_nothing():
    chunk = Span("worker 0", "update 3", 11.5, 14.0)  # begun in update 2, and going on into update 3
    waiting = Span("trainer", "waiting", 10.5, 11.5)
    before, later = Span("worker 0", "update 1", 8.0, 10.0), Span("worker 1", "update 4", 13.0, 15.0)
    early = Span("worker 1", "update 2", 9.0, 10.5)
    shown = typical(
        [
            update(1, 0.0, 9.0),
            update(2, 10.0, 3.0, chunk, waiting, before, early, later),
            update(3, 13.0, 1.0),
        ]
    )
    assert (shown["update"], shown["seconds"]) == (2, 3.0)
    spans = sorted(tuple(span.values()) for span in shown["spans"])
    assert spans == [
        ("trainer", "rollout", 0.0, 0.5),
        ("trainer", "update", 1.5, 3.0),
        ("trainer", "waiting", 0.5, 1.5),
        ("worker 0", "update 3", 1.5, 3.0),
        ("worker 1", "update 2", 0.0, 0.5),
    ]
    assert typical([]) is None


def test_a_trainer_keeps_the_phases_of_each_of_its_updates():
    trainer = toy.trainer(total_episodes=48)
    trainer.train()
    assert [one.update for one in trainer.timelines] == [1, 2, 3]
    for one in trainer.timelines:
        assert [span.what for span in one.spans] == ["rollout", "score", "values", "update"]
    ends = [one.window for one in trainer.timelines]
    assert ends[0][1] <= ends[1][0] and ends[1][1] <= ends[2][0]
