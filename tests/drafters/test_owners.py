"""What is kept of owners: as long as they have requests, and of the last ones after that."""

from specserve_drafters.tenants import PerTenant


def test_requests_of_an_owner_share_what_others_do_not_see():
    scopes = PerTenant(list)
    each = [(0, "", ""), (0, "", ""), (0, "a", ""), (1, "", ""), (0, "", "digest")]
    mine, too, *others = (scopes.begin(id, scope) for id, scope in enumerate(each))
    assert mine is too is scopes.of(0) is scopes.find((0, "", ""))
    assert len({id(each) for each in (mine, *others)}) == 4
    assert scopes.find((1, "a", "")) is None


def test_those_with_requests_are_kept_and_the_last_ones_without():
    scopes = PerTenant(list, most=2)
    live = scopes.begin(0, (0, "live", ""))
    for id in range(1, 5):
        scopes.begin(id, (0, str(id), "")).append(id)
        scopes.forget(id)
    scopes.begin(9, (0, "live", ""))
    scopes.forget(9)
    assert scopes.of(0) is live and [*scopes.idle.values()] == [[3], [4]]
    assert scopes.begin(5, (0, "3", "")) == [3] and scopes.begin(6, (0, "2", "")) == []
    scopes.forget(77)


def test_requests_go_on_with_new_objects_after_a_reset():
    scopes = PerTenant(list)
    for id in (0, 1):
        scopes.begin(id, (0, "", "")).append(id)
    scopes.reset()
    assert scopes.of(0) == [] and scopes.of(0) is scopes.of(1)
    scopes.forget(0)
    scopes.forget(1)
    assert [*scopes.idle] == [(0, "", "")]
