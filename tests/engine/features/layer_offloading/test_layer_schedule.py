"""Which layers are on the card when: what computes is always there, the next one is on its way, and never more than two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.features.layer_offloading.layer_schedule import Schedule


class Card:
    """Carries the moves out and notes what was fetched only when it was needed: time in which the card would wait."""

    def __init__(self, count):
        self.schedule, self.there, self.waits, self.fetched = Schedule(count), set(), 0, 0
        self.do(self.schedule.start())

    def do(self, moves, needed=None):
        for layer in moves.release:
            self.there.remove(layer)  # KeyError where something is let go that is not there
        self.waits += needed is not None and needed not in self.there
        for layer in moves.fetch:
            assert layer not in self.there
            self.there.add(layer)
            self.fetched += 1
        assert self.there == self.schedule.held
        assert len(self.there) <= 2
        assert needed is None or needed in self.there

    def forward(self, layer, gradients):
        self.do(self.schedule.forward(layer, gradients=gradients), layer)
        assert layer in self.there
        self.do(self.schedule.computed(layer, gradients=gradients))

    def step(self, count, passes=1):
        for _ in range(passes):
            for layer in range(count):
                self.forward(layer, True)
        for _ in range(passes):
            for layer in reversed(range(count)):
                self.do(self.schedule.backward(layer), layer)
        self.do(self.schedule.ended())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_training_never_waits_for_a_layer_and_fetches_each_twice_a_step(count):
    card = Card(count)
    for _ in range(3):
        before = card.fetched
        card.step(count)
        assert card.waits == 0
        # All but those that lie at the turns come forward and backward.
        assert card.fetched - before == max(0, 2 * count - 2)
        assert card.there == {0}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_passes_without_gradients_go_round_and_never_wait(count):
    card = Card(count)
    for _ in range(4):
        for layer in range(count):
            card.forward(layer, False)
    assert card.waits == 0
    card.step(count)
    assert card.waits == 0


def test_two_passes_before_one_backward_wait_only_where_the_next_begins():
    card = Card(6)
    card.step(6, passes=2)
    assert card.waits == 2  # the second pass forward, and the first one's way back


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.sampled_from("fgbe")), max_size=40)
        )
    )
)
def test_whatever_the_order_what_computes_is_there(drawn):
    count, calls = drawn
    card = Card(count)
    for layer, kind in calls:
        if kind in "fg":
            card.forward(layer, kind == "g")
        elif kind == "b":
            card.do(card.schedule.backward(layer), layer)
        else:
            card.do(card.schedule.ended())
