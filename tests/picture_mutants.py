"""Small faults in the page and the pictures of heads. test_pictures.py proves that its checks notice each."""

# file in inspection/ -> fault -> text that stands there once, and what the fault makes of it.
FAULTS: dict[str, dict[str, tuple[str, str]]] = {
    "page.html": {
        "the column of a token is its row": ("who ? amount(i, shown) : amount(shown, i)", "amount(shown, i)"),
        "a transposed picture": (
            "Math.floor(row / step) * n + Math.floor(key / step)",
            "Math.floor(key / step) * n + Math.floor(row / step)",
        ),
        "pools show a mean": (
            "if (value > largest[pixel]) largest[pixel] = value",
            "largest[pixel] = Math.max(0, largest[pixel]) + value / step ** 2",
        ),
        "pools as if a pixel of the screen were one of the page": ("width * devicePixelRatio", "width"),
        "future cells are painted": ("fill(-1)", "fill(0)"),
        "no square root": ("Math.sqrt(value / 65535)", "(value / 65535)"),
        "a scale for each picture": ("const end = scaleEnd() || 1;", "const end = Math.max(...largest) / 65535;"),
        "numbers of the scale are even": ("place ** 2 * end", "place * end"),
        "small pictures in the opposite order": (
            "paint(canvas, i, width)",
            "paint(canvas, heads.length - 1 - i, width)",
        ),
        "a tag of another head": ("tagOf(i).replaceAll", "tagOf(Math.max(0, i - 1)).replaceAll"),
        "score and chance change places": ("[score, even] = scores", "[even, score] = scores"),
        "labels of tokens off by one": ('make("bdi", {}, labels[i])', 'make("bdi", {}, labels[i + 1])'),
        "names on the axes off by one": ('[make("bdi", {}, label), ` ${i}`]', "[labels.at(i - 1), ` ${i}`]"),
        "numbers at the edges of cells": ("(100 * (i + 0.5)) / across", "(100 * i) / across"),
        "axes end with the text, pictures with a pool": ("Math.ceil(T / step) * step;", "T;"),
        "the outline of the row, not of the column": (
            "left: percent(shown), top: percent(shown), width: percent(1), height: percent(T - shown)",
            "left: 0, top: percent(shown), width: percent(shown + 1), height: percent(1)",
        ),
        "words around another token": ("beside(i, 1)", "beside(i + 1, 1)"),
        "shades of another head": (
            "weight(loaded.triangles[state.head], row, key) *",
            "weight(loaded.triangles.at(state.head - 1), row, key) *",
        ),
        "shades against one, not the largest": (
            "(100 * amounts[i]) / largest).toFixed",
            "(100 * amounts[i]) / 1).toFixed",
        ),
        "attention stands for influence": (
            "weight(loaded.influence, shown, i)",
            "weight(loaded.triangles[0], shown, i)",
        ),
        "the prediction before the token": (".predictions[shown]", ".predictions[Math.max(0, shown - 1)]"),
        "values without weights": ("lengths ? triangle[i] * lengths[key]", "lengths ? 65535 * lengths[key]"),
        "lengths of the first head": ("subarray(head * T)", "subarray(0)"),
        "the largest value of the first head": ("head < heads.length; head++", "head < 1; head++"),
        "likeliest and unlikeliest change places": ("shown) + first + i", "shown) + (count / 2 - first) + i"),
        "what the token before says": ("const place = start(shown)", "const place = start(shown - 1)"),
        "amounts that round to 0 are listed": ("Number(figure(amounts[i])) > 0", "true"),
        "logits of another head": ("loaded.logits[place]", "loaded.logits[place - T * count]"),
        "the pointer names the corner of a pool": ("if (!found || amount", "if (!found || 0 > amount"),
        "the pointer takes keys for queries": (
            "const top = place(event.clientY - box.top)",
            "const top = place(event.clientX - box.left)",
        ),
        "a press chooses the key": ("cell[state.who ? 1 : 0]", "cell[1]"),
        "a button chooses the head before": (
            "onclick: () => show({ head: i })",
            "onclick: () => show({ head: i - 1 })",
        ),
        "the right arrow goes two tokens on": ("state.token + 1)", "state.token + 2)"),
        "the slider counts from the end": (
            'checkpoint: Number($("slider").value)',
            'checkpoint: last - Number($("slider").value)',
        ),
        "the slider changes the words only": ("load(state.checkpoint)", "load(last)"),
        "links are read one token further": ("? Number(token) : -1", "? Number(token) + 1 : -1"),
    },
    "page.py": {
        "the file stores patterns transposed": (
            "encode(inspection.pattern(*head))",
            "encode(inspection.pattern(*head).T)",
        ),
        "the file stores the first checkpoint only": (
            "encode(inspection.pattern(*head))",
            "encode(inspections[0].pattern(*head))",
        ),
        "the file stores lengths in another order": ("for head in last.heads])", "for head in last.heads[::-1]])"),
        "the file rounds logits to tenths": ("pack(logits,", "pack((10 * logits).round() / 10,"),
        "the file has the chance of the first head": ("number(of, name, head)", "number(of, name, (0, 0))"),
    },
    "plots.py": {
        "tiles in columns": ("row, column = divmod(number, columns)", "column, row = divmod(number, rows)"),
        "tiles transposed": ("pool(inspection.pattern(*head), step)", "pool(inspection.pattern(*head).T, step)"),
        "tiles pool by the mean": ("F.max_pool2d(", "F.avg_pool2d("),
        "tiles blurred": ('interpolation="nearest"', 'interpolation="bilinear"'),
        "tiles without the square root": ("PowerNorm(0.5", "PowerNorm(1.0"),
        "tiles on a scale of their own": ("vmin=0, vmax=1", "vmin=0, vmax=0.5"),
        "tiles paint the future": ("pooled.masked_fill(~make_causal_mask(len(pooled)), math.nan)", "pooled"),
        "tags of the first head": (
            "tag(kind_of(inspection.scores, head))",
            "tag(kind_of(inspection.scores, heads[0]))",
        ),
        "names shift from tile to tile": ("start * pitch +", "start * size +"),
        "a picture does not say that it pools": ("if step > 1 else", "if step > 99 else"),
    },
}
MUTANTS = {name: (file, *texts) for file, faults in FAULTS.items() for name, texts in faults.items()}
