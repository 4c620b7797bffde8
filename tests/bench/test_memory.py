"""How the memory's figures are taken: what a fixed split is."""

from specserve_bench.figures import memory


def test_a_fixed_split_gives_neither_side_the_others_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "ROUNDS", 1)
    load = memory.ElasticLoad(6, 120, 40)
    split, seen = memory.split, []

    def watched(llm, share):
        split(llm, share)
        pool, scheduler, step = llm.engine.pool, llm.engine.scheduler, llm.engine.step

        def step_and_look():
            said = step()
            seen.append((pool.num_blocks, [*scheduler.running]))
            drafts = [b for r in scheduler.running for b in r.draft_table.blocks]
            targets = [b for r in scheduler.running for b in r.table.blocks]
            assert all(b < pool.num_blocks for b in targets)
            assert all(b >= pool.num_blocks for b in drafts)
            return said

        llm.engine.step = step_and_look

    monkeypatch.setattr(memory, "split", watched)
    figure = memory.one_load(load, memory.larger_draft(tmp_path))
    assert figure["draft_bytes_over_target"] == 0.25
    assert figure["blocks"] == int(0.6 * 60 * 1.25)
    assert seen[0][0] == round(figure["blocks"] * 0.8)
    assert min(figure["tokens_per_s"].values()) > 0
