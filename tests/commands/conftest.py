import pytest
from toy_models import registered


@pytest.fixture(scope="module")
def models(storage):
    """Returns {name: folder} of a policy and a reward that are registered in `storage`."""
    return registered(storage)
