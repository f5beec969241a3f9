"""Keys of users: two spellings of one key, kept as a hash."""

from __future__ import annotations

from attrs import evolve

from fray.tinker.core.keys import ServiceUser, hash_of, new_key, tinker_key_of, user_of_key


def test_both_spellings_of_a_key_have_one_user_until_it_is_revoked() -> None:
    keys = [new_key(lambda size, digit=digit: digit * 2 * size) for digit in "ab"]
    assert keys[0] == "otk_" + "a" * 32
    assert tinker_key_of(keys[0]) == "tml-" + "a" * 32
    ada, bob = (ServiceUser(f"user_{at}", f"n{at}", hash_of(key), 0.0) for at, key in enumerate(keys))
    users = {"user_0": ada, "user_1": bob}
    assert [user_of_key(users, key) for key in (*keys, *map(tinker_key_of, keys))] == [ada, bob, ada, bob]
    assert user_of_key(users, "a" * 32) is None
    assert user_of_key(users, "") is None
    assert user_of_key(users, "tml-") is None
    users["user_0"] = evolve(ada, key_hash="")
    assert [user_of_key(users, spelled(keys[0])) for spelled in (str, tinker_key_of)] == [None, None]
