import os
import sys

# The tests run from the source tree as well as from CTest, which sets PYTHONPATH itself.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib", "python"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
