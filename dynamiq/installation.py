"""Finding the other ``dynamiq`` on PyPI, a framework for agents, in the same place as this one."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def check_installation(package: Path) -> None:
    """Raise ImportError if the distribution ``dynamiq`` has written into our package folder.

    Both install as ``dynamiq/``, file over file, so whatever comes next would fail obscurely.
    """
    try:
        other = distribution("dynamiq")
    except PackageNotFoundError:
        return
    place = Path(str(other.locate_file("dynamiq")))
    if place.exists() and place.samefile(package):
        raise ImportError(
            f"the package 'dynamiq' {other.version}, another project, is installed in {package} "
            f"over 'dynamiq-allreduce'; run: pip uninstall dynamiq dynamiq-allreduce, then: "
            f"pip install dynamiq-allreduce"
        )
