"""Verdicts of rewards by name, case by case, beside those of slime at commit 624b824 (``slime/rollout/rm_hub``).

The two agree but where a case says why slime's is wrong. Of ``ifbench`` slime's are those of IFBench at commit db69a6f,
for slime takes it as it is on the day.
"""

from dataclasses import dataclass, field
from typing import Any

#: slime raises, which ends its rollout.
RAISES = "raises"


@dataclass(frozen=True)
class Case:
    reward: str
    text: str
    label: Any
    #: Our number; ``RAISES`` where it is a named failure.
    verdict: float | str
    #: slime's, where it is another.
    slime: float | str | None = None
    why: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


def boxed(answer: str) -> str:
    return f"So it is \\boxed{{{answer}}}."


_HALF = "\\frac{1}{2}"
_FOUR = {"choices": ["red", "green", "dark blue", "no colour"]}

MATHS = [
    Case("math", boxed("5"), "5", 1),
    Case("math", boxed("5"), "6", 0),
    Case("math", "It is 5.", "5", 0),
    Case("math", "\\boxed{6}, no, \\boxed{5}", "5", 1),
    Case("math", "\\boxed{5}, no, \\boxed{6}", "5", 0),
    Case("math", "\\boxed{5", "5", 0),
    Case("math", boxed("5"), "", 0),
    Case("math", boxed("5"), "\\boxed{5}", 1),
    Case("math", boxed("\\dfrac12"), _HALF, 1),
    Case("math", boxed("0.5"), _HALF, 1),
    Case("math", boxed("2/4"), "1/2", 0),
    Case("math", boxed("6/3"), "2", 0),
    Case("math", boxed("5.0"), "5", 1),
    Case("math", boxed("1,000"), "1000", 1),
    Case("math", boxed("32348"), "\\$32,\\!348", 1),
    Case("math", boxed("x=5"), "5", 1),
    Case("math", boxed("5 \\text{ cm}"), "5", 1),
    Case("math", boxed("90^\\circ"), "90", 1),
    Case("math", boxed("50\\%"), "50", 1),
    Case("math", boxed("5 million"), "5*10^6", 1),
    Case("math", boxed("\\text{Cat}"), "cat", 1),
    Case("math", boxed("(1, 2)"), "(1,2)", 1),
    Case("math", boxed("(2,1)"), "(1,2)", 0),
    Case("math", boxed("(1,2)"), "[1,2)", 0),
    Case("math", boxed("(0.5,3)"), "(\\frac{1}{2},3)", 1),
    Case("math", boxed("1+x"), "x+1", 1),
    Case("math", boxed("\\frac{1}{\\sqrt{2}}"), "\\frac{\\sqrt{2}}{2}", 1),
    Case("math", boxed("7\\frac{3}{4}"), "31/4", 1),
    Case("math", boxed("1024"), "2^{10}", 1, 0, "slime wants a label written out too"),
    Case("math", boxed("2^{10}"), "1024", 0),
    Case("math", boxed("1/2"), "2/4", 1, 0, "slime wants a label reduced too"),
    Case("math", boxed("xyz"), "zyx", 0),
    Case("math", boxed("\\frac{x}{2}+\\frac{1}{2}"), "\\frac{x+1}{2}", 1, 0, "slime reads (x+1)/2 as x+1/2"),
    Case("math", boxed("x+\\frac{1}{2}"), "\\frac{x+1}{2}", 0, 1, "slime reads (x+1)/2 as x+1/2"),
    Case("math", boxed("\\sqrt{x}"), "\\sqrt[3]{x}", 0, 1, "slime leaves the index of a root out"),
    Case("math", boxed("73/4"), "7 3/4", 0, 1, "slime leaves the blank of a mixed number out"),
    Case("boxed_math", boxed("5"), "5", 1, 0, "slime looks for a box inside the box"),
    Case("boxed_math", "5", "5", 0),
    Case("deepscaler", f"<think>\\boxed{{6}}</think>{boxed('5')}", "5", 1),
    Case("deepscaler", f"<think>\\boxed{{5}}</think>{boxed('6')}", "5", 0),
    Case("deepscaler", "<think>\\boxed{5}</think>", "5", 0),
    Case("deepscaler", f"###Response {boxed('5')}", "5", 1),
    Case("deepscaler", boxed("5"), "5", 0),
    Case("boxed_deepscaler", f"hm</think>{boxed('5')}", "5", 1, 0, "slime takes what it looks for away"),
]

QUICK = [
    Case("dapo", "Answer: 34", "34", 1),
    Case("dapo", "answer : $34$", "34", 1),
    Case("dapo", "Answer: 5\nAnswer: 34", "34", 1),
    Case("dapo", "Answer: 34\nAnswer: 5", "34", -1),
    Case("dapo", "The answer is 34", "34", -1),
    Case("dapo", "Answer: 34" + " " * 300, "34", -1),
    Case("dapo", "Answer: x = 34", "34", 1),
    Case("dapo", "Answer: \\boxed{34}", "34", 1),
    Case("dapo", "Answer: \\boxed{\\text{34}} degrees", "34", 1),
    Case("dapo", "Answer: 1,234", "1234", 1),
    Case("dapo", "Answer: 034", "34", -1),
    Case("dapo", "Answer: 34.", "34", -1),
    Case("dapo", "Answer: 34", "34.0", 1),
    Case("dapo", "Answer: 12345678901234567891", "12345678901234567891", 1, -1, "slime's label goes through a float"),
    Case("dapo", "Answer: 1/2", "\\frac{1}{2}", RAISES),
    Case("boxed_dapo", boxed("34"), "34", 1, -1, "slime takes `Answer:` away, and looks for it"),
    Case("f1", "The cat sat.", "the cat sat", 1),
    Case("f1", "a cat", "the dog", 0),
    Case("f1", "red cat", "red dog", 0.5),
    Case("f1", "", "cat", 0),
    Case("f1", "cat", "", 0),
    Case("f1", "yes it is", "yes", 0),
    Case("f1", "Yes!", "yes", 1),
    Case("f1", "no answer", "noanswer", 0),
    Case("f1", "cat", ["dog", "cat"], 1, RAISES, "SQuAD's labels are lists, of which the best counts"),
    Case("boxed_f1", boxed("red cat"), "red cat", 1),
    Case("boxed_f1", "red cat", "red cat", 0),
    Case("gpqa", "The answer is B", "B", 1, metadata=_FOUR),
    Case("gpqa", "Answer: (B)", "B", 1, metadata=_FOUR),
    Case("gpqa", "A, or C: I take C", "C", 1, metadata=_FOUR),
    Case("gpqa", "The answer is B", "C", 0, metadata=_FOUR),
    Case("gpqa", "Answer: A</think>Answer: B", "B", 1, metadata=_FOUR),
    Case("gpqa", "B is the correct one", "B", 1, metadata=_FOUR),
    Case("gpqa", "Answer: C", "dark blue", 1, metadata=_FOUR),
    Case("gpqa", "It is dark blue.", "C", 1, metadata=_FOUR),
    Case("gpqa", "It is dark blue.", "dark blue", 1),
    Case("gpqa", "Answer: C", 2, 1, metadata=_FOUR),
    Case("gpqa", "Answer: C", "A", 1, metadata={"correct_letter": "c", **_FOUR}),
    Case("gpqa", "Answer: J", "J", 1),
    Case("gpqa", "The answer is _B_.", "B", 1, metadata=_FOUR),
    Case("gpqa", "A, or C: I take _C_", "C", 1, metadata=_FOUR),
    Case("gpqa", "**Option _B_**", "B", 1, metadata=_FOUR),
    Case("gpqa", "The force F_B is large, so A", "A", 1, metadata=_FOUR),
    Case("gpqa", "__B__ is correct", "B", 1, metadata=_FOUR),
    Case("gpqa", "", "B", 0, metadata=_FOUR),
    Case("gpqa", "The answer is (B)", "B", 1, 0, "without choices slime reads the I of is"),
    Case(
        "gpqa", "The answer depends. I say B", "B", 1, 0, "slime reads the d of depends", {"valid_letters": ["B", "D"]}
    ),
    Case("gpqa", "maybe", "B", 0, 1, "slime finds the b of maybe", _FOUR),
    Case("gpqa", "I know nothing", "no", 0, 1, "slime finds the no of know"),
    Case("exact_match", " 12 \n", "12", 1, RAISES, "slime has none of that name"),
]


def following(*names: str, **more: Any) -> dict[str, Any]:
    return {"instruction_id_list": list(names), **more}


_COMMA, _TITLE, _WORDS = "punctuation:no_comma", "detectable_format:title", "length_constraints:number_words"
_TWO = {"num_words": 2, "relation": "at least"}
_QUOTES, _SPAN, _PLACE = "format:quote_unquote", "repeat:repeat_span", "words:keywords_specific_position"
_FIRST_TWO = {"prompt_to_repeat": "One two three.", "n_start": 0, "n_end": 1}
_SPANS = "slime counts letters, where IFBench's prompts say words, and both ends included"

INSTRUCTIONS = [
    Case("ifbench", "No comma.", "", 1, metadata=following(_COMMA)),
    Case("ifbench", "One, two.", "", 0, metadata=following(_COMMA)),
    Case("ifbench", "<<A>> no comma", "", 1, metadata=following(_COMMA, _TITLE)),
    Case("ifbench", "<<A>> one, two", "", 0, metadata=following(_COMMA, _TITLE)),
    Case("ifbench", "no comma", "", 0, metadata=following(_COMMA, _TITLE)),
    Case("ifbench", "", "", 0, metadata=following(_COMMA)),
    Case("ifbench", " \n", "", 0, metadata=following(_COMMA)),
    Case("ifbench", "two words", "", 1, metadata=following(_WORDS, kwargs=[_TWO])),
    Case("ifbench", "one", "", 0, metadata=following(_WORDS, kwargs=[_TWO])),
    Case("ifbench", "one", "", 0, metadata=following(_WORDS, kwargs=_TWO)),
    Case("ifbench", "one two", "", 1, metadata=following(_COMMA, _WORDS, kwargs=[{"num_words": None}, _TWO])),
    Case("ifbench", "one", "", 0, metadata=following(_WORDS, _WORDS, kwargs=[_TWO])),
    Case("ifbench", "a, b</think>no comma", "", 0, metadata=following(_COMMA)),
    Case("ifbench", "*<<A>>*", "", 1, metadata=following(_TITLE)),
    Case(
        "ifbench", "Say it. Yes", "", 1,
        metadata=following("combination:repeat_prompt", kwargs={"prompt_to_repeat": "Say it."}, prompt_text="Say it."),
    ),
    Case("ifbench", "1 and 2", "", 1, metadata=following("count:numbers", kwargs=[{"N": 2}])),
    Case("ifbench", "1 and two", "", 0, metadata=following("count:numbers", kwargs=[{"N": 2}])),
    Case("ifbench", "Leo met Zoe.", "", 1, metadata=following("count:person_names", kwargs=[{"N": 2}])),
    Case("ifbench", "Leonardo met Zoe.", "", 0, metadata=following("count:person_names", kwargs=[{"N": 2}])),
    Case("ifbench", "This was all.", "", 1, metadata=following("count:pronouns", kwargs=[{"N": 2}])),
    Case("ifbench", "You're in and/or it.", "", 1, metadata=following("count:pronouns", kwargs=[{"N": 2}])),
    Case("ifbench", "You're in.", "", 0, metadata=following("count:pronouns", kwargs=[{"N": 2}])),
    Case("ifbench", 'He said "a" and left.', "", 1, metadata=following(_QUOTES)),
    Case("ifbench", 'He said "a"', "", 0, metadata=following(_QUOTES)),
    Case("ifbench", "- *", "", 1, metadata=following(_QUOTES)),
    Case("ifbench", "He said \u201ca\u201d", "", 0, 1, "slime lets quotes pass that are curly", following(_QUOTES)),
    Case("ifbench", "A Big Cat - 2", "", 1, metadata=following("format:title_case")),
    Case("ifbench", "a Big Cat", "", 0, metadata=following("format:title_case")),
    Case("ifbench", "The cat", "", 0, metadata=following("format:title_case")),
    Case("ifbench", "One  two", "", 1, 0, _SPANS, following(_SPAN, kwargs=[_FIRST_TWO])),
    Case("ifbench", "on", "", 0, 1, _SPANS, following(_SPAN, kwargs=[_FIRST_TWO])),
    Case("ifbench", "one", "", 0, metadata=following(_SPAN, kwargs=[_FIRST_TWO])),
    Case("ifbench", "A dog. A Cat.", "", 1, metadata=following("sentence:keyword", kwargs=[{"N": 2, "word": "cat"}])),
    Case("ifbench", "A dog. Cats.", "", 0, metadata=following("sentence:keyword", kwargs=[{"N": 2, "word": "cat"}])),
    Case("ifbench", '"A Cat" sat.', "", 1, metadata=following(_PLACE, kwargs=[{"keyword": "cat", "n": 1, "m": 2}])),
    Case("ifbench", "A dog sat.", "", 0, metadata=following(_PLACE, kwargs=[{"keyword": "cat", "n": 1, "m": 2}])),
    Case("ifbench", "A cat and Cat z.", "", 1, metadata=following("words:words_position", kwargs=[{"keyword": "cat"}])),
    Case("ifbench", "A cat and cat", "", 0, metadata=following("words:words_position", kwargs=[{"keyword": "cat"}])),
    Case("ifbench", "One two. Two three.", "", 1, metadata=following("words:last_first")),
    Case("ifbench", "One two. Three.", "", 0, metadata=following("words:last_first")),
    Case("ifbench", "See this. And that. Is it?", "", 1, metadata=following("ratio:sentence_type")),
    Case("ifbench", "See foo.bar. Is it?", "", 0, metadata=following("ratio:sentence_type")),
    Case("boxed_ifbench", "a, " + boxed("b"), "", 1, metadata=following(_COMMA)),
    Case("ifbench", "x", "", RAISES, metadata=following("punctuation:nobody_knows")),
    Case("ifbench", "x", "", RAISES, 0, "a prompt without instructions is a mistake in the data", metadata=following()),
    Case("ifbench", "x", "", RAISES, 0, "metadata under another name are a mistake in the data"),
    Case("ifbench", "x", "", RAISES, metadata=following(_WORDS, kwargs=[{"nobody": 1}])),
]  # fmt: skip
