"""Trainer collects garbage in every run; what is imported once need not be looked through each time."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
