"""The engine in your own process: several prompts at once, then one answer as it comes.

Run it with ``python examples/offline_generate.py [MODEL]``; without a model it takes the embedded
one.
"""

import sys

from hotshoe import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "embedded"

with LLM(model, max_model_len=1024) as llm:
    prompts = ["The capital of France is", "The opposite of hot is", "One, two, three,"]
    params = SamplingParams(temperature=0, max_tokens=16)
    for output in llm.generate(prompts, params):
        print(f"{output.prompt}|{output.text!r}")

    question = [{"role": "user", "content": "What is a ferry? Answer in one sentence."}]
    params = SamplingParams(temperature=0.3, top_p=0.9, seed=1, max_tokens=64)
    for output in llm.stream(llm.render_chat(question), params):
        print(output.outputs[0].new_text, end="", flush=True)
    print()
