"""What `treegen bench search --methods` counts."""

from treegen.bench.search_methods import compare_methods


def test_batches_bring_tree_search_to_the_passes_of_a_beam() -> None:
    beam, one, many = compare_methods(
        problems=2, samples=3, breadth=2, depth=4, step_tokens=4, batches=(1, 8), repeats=2
    )
    assert [row.name for row in (beam, one, many)] == [
        "beam",
        "mcts, batches of 1",
        "mcts, batches of 8",
    ]
    assert beam.decoded == 2 * (3 + 3 * 2 * 3) * 4
    assert beam.decoded <= one.decoded <= many.decoded < 1.2 * beam.decoded
    assert many.steps <= 1.3 * beam.steps < one.steps
