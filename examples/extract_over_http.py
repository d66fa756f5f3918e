"""Data out of text through OpenAI's client: ``parse`` sends a pydantic model and gives one back.

Start ``hotshoe serve``, then run ``python examples/extract_over_http.py [URL]``; without a URL it
asks the server on this machine.
"""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Crossing(BaseModel):
    """A ferry line."""

    ship: str = Field(max_length=20)
    harbours: list[Literal["Harwich", "Hook of Holland", "Dover"]] = Field(
        min_length=2, max_length=2
    )
    duration_h: int = Field(ge=1, le=99)
    takes_cars: bool


TEXT = "The Stena Britannica sails from Harwich to Hook of Holland in 7 hours; cars are welcome."

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    served = client.models.list().data[0].id
    answer = client.chat.completions.parse(
        model=served,
        messages=[{"role": "user", "content": f"Give the facts as JSON.\n\n{TEXT}"}],
        response_format=Crossing,
        temperature=0,
        max_completion_tokens=300,
    )
    crossing = answer.choices[0].message.parsed
    if crossing is None:
        sys.exit(f"no answer: {answer.choices[0].message.refusal}")
    print(crossing.ship, "|", " - ".join(crossing.harbours), "|", crossing.duration_h, "h")

    # other constraints go into the body as they are
    answer = client.chat.completions.create(
        model=served,
        messages=[{"role": "user", "content": "What colour is grass?"}],
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["red", "green", "blue"]}},
    )
    print(answer.choices[0].message.content)
