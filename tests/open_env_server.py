"""An OpenEnv server for tests, at the port given: a number is to be guessed, and each guess is told how it compares."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Told(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._state = State(step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, number: int = 7, **_: object) -> Told:
        self._number, self._state = number, State(step_count=0)
        return Told(text="guess", done=False, reward=0.0)

    def step(self, action: Guess, **_: object) -> Told:
        self._state.step_count += 1
        guess = int(action.message)
        right = guess == self._number
        text = "right" if right else "higher" if guess < self._number else "lower"
        return Told(text=text, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    uvicorn.run(create_fastapi_app(Guessing, Guess, Told), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
