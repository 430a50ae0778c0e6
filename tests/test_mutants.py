# SPDX-License-Identifier: Apache-2.0
"""The list of `make mutants` is true."""

import mutants


def test_each_mutant_is_in_the_sources_once():
    assert mutants.problems() == []


def test_mutants_differ():
    changes = [(mutant.file, mutant.old, mutant.new) for mutant in mutants.mutants()]
    assert len(changes) >= 100
    assert len(set(changes)) == len(changes)
