"""Whether a folder's tensors are those that the weight map reads: decided from names and shapes, before any data is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from model.errors import CheckpointError, ModelError, UnsupportedModel
from model.folder import TensorManifest
from model.formats import FORMAT_OF_DTYPE
from model.loading.geometry import read_shape, selected_shape, tiling
from model.pieces import Piece, WeightMap

LISTED = 20
"""Names shown in a message before it says how many more there are."""


def listing(names: Iterable[str]) -> str:
    """Sorted names, at most LISTED of them spelled out."""
    ordered = sorted(names)
    rest = len(ordered) - LISTED
    return ", ".join(ordered[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def check_manifest(weight_map: WeightMap, manifest: TensorManifest) -> None:
    """Raise CheckpointError for missing, surplus and mis-shaped tensors, UnsupportedModel for stored dtypes without a format.

    Tensors that only other ranks read are looked for too, so that every rank refuses a folder alike.
    """
    pieces = [piece for parts in weight_map.pieces.values() for piece in parts]
    read = {piece.name for piece in pieces}
    missing = (read | weight_map.foreign) - manifest.keys()
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing: {listing(missing)}")
    surplus = [
        name for name in manifest if name not in read and name not in weight_map.foreign and not name.startswith(weight_map.ignored)
    ]
    if surplus:
        raise CheckpointError(f"{len(surplus)} tensors are in the folder that this model does not use: {listing(surplus)}")
    wrong = {piece.name: piece.shape for piece in pieces if manifest[piece.name].shape != piece.shape}
    if wrong:
        said = (f"{name} is {list(manifest[name].shape)}, not {list(shape)}" for name, shape in wrong.items())
        raise CheckpointError(f"{len(wrong)} tensors have another shape than the configuration asks for: {listing(said)}")
    strange = {name for name in read if manifest[name].dtype not in FORMAT_OF_DTYPE}
    if strange:
        said = (f"{name} is {manifest[name].dtype}" for name in strange)
        raise UnsupportedModel(f"tensors of dtypes that are not served ({', '.join(FORMAT_OF_DTYPE)}): {listing(said)}")


def check_targets(parameters: Mapping[str, tuple[int, ...]], pieces: Mapping[str, tuple[Piece, ...]]) -> dict[str, int]:
    """Rows of each parameter that its pieces fill; what lies past them is padding. Raises ModelError for a map that does not fit.

    `parameters` are names and shapes. Every piece must match its target's shape, none may meet another, and together they fill the
    leading rows of their parameter (the first dimension) without gaps.
    """
    if parameters.keys() != pieces.keys():
        raise ModelError(f"parameters without pieces, or pieces without a parameter: {listing(parameters.keys() ^ pieces.keys())}")
    filled = {}
    for name, shape in parameters.items():
        for piece in pieces[name]:
            if read_shape(piece) != selected_shape(shape, piece.target):
                raise ModelError(
                    f"{piece.name} gives {read_shape(piece)}, its target in {name} is {selected_shape(shape, piece.target)}"
                )
        rows, overlap = tiling(shape, pieces[name])
        if rows < 0 or overlap:
            raise ModelError(
                f"the pieces of {name} {'meet' if overlap else 'leave gaps'}: {listing({p.name for p in pieces[name]})}"
            )
        filled[name] = rows
    return filled
