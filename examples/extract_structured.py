"""Data out of text: the answer is JSON that fits a pydantic model, whatever the model writes.

Run it with ``python examples/extract_structured.py [MODEL]``; without a model it takes the embedded
one.
"""

import sys
from typing import Literal

from pydantic import BaseModel, Field

from hotshoe import LLM, SamplingParams, StructuredOutputs


class Crossing(BaseModel):
    """A ferry line."""

    ship: str = Field(max_length=20)
    harbours: list[Literal["Harwich", "Hook of Holland", "Dover"]] = Field(
        min_length=2, max_length=2
    )
    duration_h: int = Field(ge=1, le=99)
    takes_cars: bool


TEXT = "The Stena Britannica sails from Harwich to Hook of Holland in 7 hours; cars are welcome."

model = sys.argv[1] if len(sys.argv) > 1 else "embedded"

with LLM(model, max_model_len=1024) as llm:
    question = [{"role": "user", "content": f"Give the facts as JSON.\n\n{TEXT}"}]
    params = SamplingParams(
        temperature=0,
        max_tokens=300,
        structured_outputs=StructuredOutputs(json=Crossing),
    )
    crossing = Crossing.model_validate_json(llm.chat(question, params)[0].text)
    print(crossing.ship, "|", " - ".join(crossing.harbours), "|", crossing.duration_h, "h")

    feelings = StructuredOutputs(choice=("positive", "negative"))
    params = SamplingParams(temperature=0, structured_outputs=feelings)
    reviews = ["A dull film with a bad ending.", "I loved every minute of it!"]
    prompts = [f"Review: {review}\nSentiment: " for review in reviews]
    for output in llm.generate(prompts, params):
        print(output.prompt.partition("\n")[0], "->", output.text)
