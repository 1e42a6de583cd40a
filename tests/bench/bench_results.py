"""The flat file of figures that scripts/bench and its parts write."""
import json
import os


def write(path, results):
    """Into the file, beside what it has; whole, or not at all."""
    everything = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            everything = json.load(file)
    everything |= results
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(everything, file, indent=2)
        file.write("\n")
    os.replace(path + ".part", path)
