#!/usr/bin/env python3
"""Generated stories as a .jsonl file: `python data/stories.py --output FILE.jsonl`.

Each line holds a story's `text` and its `log_probability` (nats) under the grammar it is drawn
from.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from andrea_numba.program import run_program


def main() -> int:
    from andrea_numba.args import Parser
    from andrea_numba.stories import generate_stories

    parser = Parser(prog="stories.py", description=__doc__)
    parser.add_argument("--characters", type=int, default=2_000_000,
                        help="length of all stories together (default: 2000000)")
    parser.add_argument("--seed", type=int, default=0, help="which stories (default: 0)")
    parser.add_argument("--output", required=True, help=".jsonl file to write")
    options = parser.parse(None)
    stories = generate_stories(options.characters, options.seed)
    with open(options.output, "w", encoding="utf-8", newline="\n") as file:
        for story in stories:
            file.write(json.dumps(story._asdict()) + "\n")
    print(f"{options.output}: {len(stories):,} stories, "
          f"{sum(len(story.text) for story in stories):,} characters")
    return 0


if __name__ == "__main__":
    sys.exit(run_program("stories.py", main))
