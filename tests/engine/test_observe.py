from __future__ import annotations

import logging


def test_preemption_is_logged_with_what_was_chosen_and_why_once_a_second(make_rig, caplog):
    caplog.set_level(logging.INFO, "octavo.engine.observe")
    rig = make_rig(num_blocks=40, block_size=1, max_num_batched_tokens=64)
    for i in range(6):
        rig.add(f"r{i}", 100 * i, 2, max_tokens=25)
    rig.run()
    assert rig.engine.scheduler.counters.num_preemptions > 1
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("preempted r")
    assert ": recompute, --preemption-mode recompute" in lines[0]
