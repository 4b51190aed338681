from megarl.util.once import Once


def test_a_result_is_worked_out_for_the_first_use_of_its_key() -> None:
    """Also a result of None: planning asks again and again for parts that a model does not have."""
    once, asked = Once(), []

    def make(result: str | None) -> str | None:
        asked.append(result)
        return result

    found = [once((name, 1), lambda name=name: make(name)) for name in ("a", None, "a", None, "b")]
    assert found == ["a", None, "a", None, "b"] and asked == ["a", None, "b"]
    assert Once()(("a", 1), lambda: "another") == "another"
