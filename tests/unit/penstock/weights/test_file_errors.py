"""What a file system refuses is said of the weights, but for what this machine is short of."""

import errno

import pytest

from penstock.errors import PublishError
from penstock.weights.file_errors import as_publish_error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_full_disk_and_a_want_of_handles_say_nothing_of_the_weights(code: int) -> None:
    with pytest.raises(OSError, match="short") as raised, as_publish_error("x"):
        raise OSError(code, "short")
    assert raised.value.errno == code


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG])
def test_whatever_else_is_of_them(code: int) -> None:
    with pytest.raises(PublishError, match=r"x: \[Errno \d+\] lost: 'file'\."), as_publish_error("x"):
        raise OSError(code, "lost", "file")
