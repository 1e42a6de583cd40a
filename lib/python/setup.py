"""Only what pyproject.toml cannot say: the tag of the wheel. scripts/wheel puts libsluice.so.0 into the package before it
builds; the wheel is then for this platform, but for every Python 3, since nothing is compiled against Python."""
import os

from setuptools import Distribution, setup

LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sluice", "libsluice.so.0")
options = {}
if os.path.exists(LIBRARY):
    from wheel.bdist_wheel import bdist_wheel

    class PlatformWheel(bdist_wheel):
        def get_tag(self):
            return "py3", "none", super().get_tag()[2]

    class PlatformDistribution(Distribution):
        def has_ext_modules(self):
            return True

    options = {"cmdclass": {"bdist_wheel": PlatformWheel}, "distclass": PlatformDistribution}

setup(**options)
