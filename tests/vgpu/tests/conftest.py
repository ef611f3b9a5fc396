"""Without numba-cuda the tests of the virtual GPU are skipped; they launch small grids."""

import importlib.util
from pathlib import Path

import pytest


class SkippedModule(pytest.Module):
    """A test file that is not imported."""

    def collect(self):
        pytest.skip("numba-cuda is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if importlib.util.find_spec("numba_cuda") is None:
        return SkippedModule.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:Grid size"))
