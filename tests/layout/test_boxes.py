from megarl.layout import Box


def test_intersect_is_the_common_part():
    assert Box((0, 2), (4, 4)).intersect(Box((3, 0), (5, 4))) == Box((3, 2), (1, 2))


def test_boxes_that_only_touch_have_nothing_in_common():
    assert Box((0,), (4,)).intersect(Box((4,), (4,))) is None


def test_inside_moves_a_part_to_where_its_whole_lies():
    outer, place = Box((8, 0), (4, 6)), Box((100, 20), (4, 6))
    assert Box((9, 2), (2, 3)).inside(outer, place) == Box((101, 22), (2, 3))


def test_inside_keeps_the_extra_leading_dimensions_of_a_stacked_tensor():
    assert Box((1,), (2,)).inside(Box((0,), (4,)), Box((7, 10), (1, 4))) == Box((7, 11), (1, 2))


def test_inside_drops_the_leading_dimensions_that_the_place_lacks():
    assert Box((7, 1), (1, 2)).inside(Box((7, 0), (1, 4)), Box((10,), (4,))) == Box((11,), (2,))


def test_rows_and_columns():
    assert Box.rows(2, 3, (10, 5)) == Box((2, 0), (3, 5))
    assert Box.columns(2, 3, (10, 5)) == Box((0, 2), (10, 3))
    assert Box.rows(2, 3, (10,)) == Box((2,), (3,)) == Box.columns(2, 3, (10,))
