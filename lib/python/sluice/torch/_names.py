"""Tags: the stable name of "the same bucket at the next step".

DDP numbers its buckets anew after the first iteration, and moves them in memory. What stays is which parameters a bucket
holds, in which order, so a tag is a hash of their names and shapes. Names are the model's own where it is known
(State(model=...) or state.attach(ddp)). Otherwise a parameter is called by the order in which the hook first saw it: that
order is DDP's, and DDP verifies at construction that all ranks hold the same parameters in the same order.
"""
import hashlib


class Names:
    def __init__(self):
        self._names = {}  # id of a parameter -> (the parameter, so that the id stays its own; name)
        self._tags = {}  # (ids of the parameters, type, layout) -> tag
        self.known = False  # the names are the model's

    def learn(self, model):
        """Takes the names of a model, or of the model inside a DDP."""
        model = getattr(model, "module", model)
        for name, parameter in model.named_parameters():
            self._names.setdefault(id(parameter), (parameter, name))
        self.known = True

    @property
    def used(self):
        """Whether a tag was made yet; names must not change after that."""
        return bool(self._tags)

    def name(self, parameter):
        entry = self._names.get(id(parameter))
        if entry is None:
            entry = self._names[id(parameter)] = (parameter, f"#{len(self._names)}")
        return entry[1]

    def tag(self, parameters, tensor):
        """The tag of a bucket that holds `parameters` in this order, never 0."""
        key = (tuple(map(id, parameters)), tensor.dtype, tensor.layout)
        tag = self._tags.get(key)
        if tag is None:
            digest = hashlib.blake2b(digest_size=8)
            digest.update(f"{tensor.dtype} {tensor.layout}".encode())
            for parameter in parameters:
                digest.update(f"\0{self.name(parameter)} {tuple(parameter.shape)}".encode())
            tag = self._tags[key] = int.from_bytes(digest.digest(), "little") or 1
        return tag

    def describe(self, parameters):
        """'layer1.weight .. layer4.bias (12)', for reports."""
        names = [self.name(parameter) for parameter in parameters]
        if len(names) <= 2:
            return ", ".join(names)
        return f"{names[0]} .. {names[-1]} ({len(names)})"


def part_tag(tag, index, parts):
    """The tag of one part of a bucket that is larger than one op may be."""
    if parts == 1:
        return tag
    digest = hashlib.blake2b(f"{tag} {index}/{parts}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
