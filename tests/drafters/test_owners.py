"""What is kept of owners: as long as they have requests, and of the last ones after that."""

from specserve_drafters.owners import Owners


def test_requests_of_an_owner_share_what_others_do_not_see():
    owners = Owners(list)
    each = [(0, "", ""), (0, "", ""), (0, "a", ""), (1, "", ""), (0, "", "digest")]
    mine, too, *others = (owners.begin(id, owner) for id, owner in enumerate(each))
    assert mine is too is owners.of(0) is owners.find((0, "", ""))
    assert len({id(each) for each in (mine, *others)}) == 4
    assert owners.find((1, "a", "")) is None


def test_those_with_requests_are_kept_and_the_last_ones_without():
    owners = Owners(list, most=2)
    live = owners.begin(0, (0, "live", ""))
    for id in range(1, 5):
        owners.begin(id, (0, str(id), "")).append(id)
        owners.forget(id)
    owners.begin(9, (0, "live", ""))
    owners.forget(9)
    assert owners.of(0) is live and [*owners.idle.values()] == [[3], [4]]
    assert owners.begin(5, (0, "3", "")) == [3] and owners.begin(6, (0, "2", "")) == []
    owners.forget(77)


def test_requests_go_on_with_new_objects_after_a_reset():
    owners = Owners(list)
    for id in (0, 1):
        owners.begin(id, (0, "", "")).append(id)
    owners.reset()
    assert owners.of(0) == [] and owners.of(0) is owners.of(1)
    owners.forget(0)
    owners.forget(1)
    assert [*owners.idle] == [(0, "", "")]
