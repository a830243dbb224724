"""To come."""

from engine.loads import LoadBarriers


def prepare(work, zeroer, copier, mode):
    zeroer.zero(work.new_block_ids_to_zero or {})
    copier.copy(work.copies)
    return LoadBarriers()
