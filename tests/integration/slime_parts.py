"""Functions of slime's signatures, as its examples have them: a custom generate with a tool, and a custom reward."""

import asyncio
from copy import deepcopy
from typing import Any

import aiohttp

from penstock.hooks.slime import SlimeSample as Sample

#: What the tool says: ids that no draw of the fake engine has.
SAID = [20, 21]
TURNS = 2


async def post(url: str, payload: dict[str, Any]) -> Any:
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as answer:
        answer.raise_for_status()
        return await answer.json()


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two turns with a tool between them, by ids."""
    assert not args.partial_rollout
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = args.engine.tokenizer.encode(sample.prompt, add_special_tokens=False)
    for turn in range(TURNS):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        drawn = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[item[1] for item in drawn], log_probs=[item[0] for item in drawn],
            meta_info=output["meta_info"], text=output["text"],
        )  # fmt: skip
        if turn < TURNS - 1:
            sample.append_response_tokens(args, tokens=SAID, trainable=False, text="+said+")
    sample.tool_call_count = TURNS - 1  # type: ignore[attr-defined]
    return sample


async def generate_by_text(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The same by texts, without append_response_tokens."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    encode = args.engine.tokenizer.encode
    prompt, response, ids, mask = encode(sample.prompt, add_special_tokens=False), "", [], []
    for turn in range(TURNS):
        payload = {"text": sample.prompt + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        drawn = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response, ids, mask = response + output["text"], ids + drawn, mask + [1] * len(drawn)
        if turn < TURNS - 1:
            said = encode("1+1", add_special_tokens=False)
            response, ids, mask = response + "1+1", ids + said, mask + [0] * len(said)
    sample.tokens, sample.response, sample.response_length, sample.loss_mask = prompt + ids, response, len(ids), mask
    sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    calls = getattr(sample, "tool_call_count", -1)
    return {"score": args.bonus + float("+said+" in sample.response), "calls": calls, "label": sample.label}


async def masks_nothing(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Forgets that it did not draw what the tool said."""
    made = await generate(args, sample, sampling_params)
    made.loss_mask, made.rollout_log_probs = [1] * made.response_length, None
    return made


async def writes_down_others(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    made = await generate(args, sample, sampling_params)
    made.rollout_log_probs = [-0.1] * made.response_length
    return made


async def draws_greedily(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generate(args, sample, {**sampling_params, "temperature": 0.0})


async def invents(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.response_length, sample.status = [5, 6, 7], 2, Sample.Status.COMPLETED
    return sample


async def gives_without_asking(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.response_length, sample.loss_mask = [5, 6, 7], 2, [0, 0]
    sample.status = Sample.Status.COMPLETED
    return sample


async def gives_up(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.status = Sample.Status.ABORTED
    return sample


async def forgets(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
    await args.engine.generate([5, 6], {"max_new_tokens": 2})


async def asks_too_much(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await args.engine.generate([5, 6], {"max_tokens": 2})
    return sample


async def debates(args: Any, samples: list[Sample], sampling_params: dict[str, Any]) -> list[Sample]:
    """A group: each answers when it has read what those before it said."""
    heard: list[int] = []
    for own, sample in zip(args.each, samples, strict=True):
        sample.tokens = own.engine.tokenizer.encode(sample.prompt, add_special_tokens=False) + heard
        output = await own.engine.generate(sample.tokens, sampling_params)
        drawn = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            own, tokens=[item[1] for item in drawn], log_probs=[item[0] for item in drawn],
            meta_info=output["meta_info"], text=output["text"],
        )  # fmt: skip
        heard += [item[1] for item in drawn]
    return samples


async def generates_each(args: Any, samples: list[Sample], sampling_params: dict[str, Any]) -> list[Sample]:
    """A group by a function for single samples."""
    made = zip(args.each, samples, strict=True)
    return list(await asyncio.gather(*(generate(own, sample, dict(sampling_params)) for own, sample in made)))


async def copies_the_first(args: Any, samples: list[Sample], sampling_params: dict[str, Any]) -> list[Sample]:
    made = await debates(args, samples, sampling_params)
    made[1].tokens, made[1].response_length = list(made[0].tokens), made[0].response_length
    return made


async def leaves_one_out(args: Any, samples: list[Sample], sampling_params: dict[str, Any]) -> list[Sample]:
    return (await debates(args, samples, sampling_params))[:-1]


async def gives_one_twice(args: Any, samples: list[Sample], sampling_params: dict[str, Any]) -> list[Sample]:
    made = await debates(args, samples, sampling_params)
    return [made[0], made[0]]


async def only_for_evaluation(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Sample:
    assert evaluation
    return await generate(args, sample, sampling_params)


async def rewards_itself(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    made = await generate(args, sample, sampling_params)
    made.reward = {"score": 2, "why": "said so"}
    return made


async def rewards_with_words(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    made = await generate(args, sample, sampling_params)
    made.reward = "high"
    return made


async def _draw(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A copy of the sample, with one more answer."""
    one = deepcopy(sample)
    one.tokens = one.tokens or args.engine.tokenizer.encode(one.prompt, add_special_tokens=False)
    output = await args.engine.generate(one.tokens, sampling_params)
    drawn = output["meta_info"]["output_token_logprobs"]
    one.append_response_tokens(
        args, tokens=[item[1] for item in drawn], log_probs=[item[0] for item in drawn],
        meta_info=output["meta_info"], text=output["text"],
    )  # fmt: skip
    return one


async def branches(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two samples of the same prompt, and one that continues the first: of that, what it adds bears loss."""
    args = deepcopy(args)
    first, second = [await _draw(args, sample, sampling_params) for _ in range(2)]
    third = deepcopy(first)
    third.loss_mask = [0] * third.response_length
    third = await _draw(args, third, sampling_params)
    for one, calls in zip((first, second, third), (1, 2, 3), strict=True):
        one.tool_call_count = calls  # type: ignore[attr-defined]
    return [first, second, third]


async def rewards_each(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Several samples with rewards of their own."""
    made = await branches(args, sample, sampling_params)
    for one, reward in zip(made, (1.0, 2.0, 6.0), strict=True):
        one.reward = reward
    return made


async def trains_twice(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """One answer as two samples."""
    made = await _draw(args, sample, sampling_params)
    return [made, deepcopy(made)]


async def returns_nothing(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    return []


async def hides_the_second(args: Any, sample: Sample) -> None:
    """A sample hook: the second of several samples is not trained."""
    sample.remove_sample = sample.tool_call_count == 2  # type: ignore[attr-defined]
