"""Talks to a model through the module that UniFFI has generated: by_uniffi.py MODEL FILE."""

import sys

import firebox_ffi as firebox

path, file = sys.argv[1:]


class Listener(firebox.Listener):
    def __init__(self, session=None, most=None):
        self.pieces, self.session, self.most, self.inside = [], session, most, None

    def heard(self, text):
        self.pieces.append(text)
        try:
            self.session.save(file)
        except firebox.FireboxError.Busy:
            self.inside = "busy"
        return len(self.pieces) != self.most


class Deaf(firebox.Listener):
    def heard(self, text):
        raise ValueError("cannot hear")


def refused(kind, act):
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind} was expected")


model = firebox.Model.open(path)
print("heads:", "chat" in model.heads())
session = model.session()
listener = Listener(session)
answer = session.say("Who are you?", listener)
print("answer:", answer.text)
print("heard the same in several pieces:", "".join(listener.pieces) == answer.text and len(listener.pieces) > 1)
print("ended by the model:", answer.ended == firebox.Ended.STOP and answer.tokens > 1)
print("in its own callback:", listener.inside)

fact = session.add_fact("The user's dog is called Biscuit.")
print("told:", session.say("What is my dog called?").text)
session.supersede_fact(fact, "The user's dog is called Pepper.")
session.save(file)
print("superseded twice:", refused(firebox.FireboxError.NoFact, lambda: session.supersede_fact(fact, "No.")))
restored = model.restore(file)
# What a listener that fails has heard was never said.
print("deaf:", "cannot hear" in refused(firebox.FireboxError.Listener, lambda: session.say("Who are you?", Deaf())))
print("superseded:", session.say("What is my dog called?").text)
print("restored:", restored.say("What is my dog called?").text)
stopped = session.say("Who are you?", Listener(session, most=1))
print("stopped after a piece:", stopped.ended == firebox.Ended.LISTENER)
few = session.say("Who are you?", max_tokens=1)
print("few:", few.ended == firebox.Ended.LENGTH and few.tokens == 1)
session.use_head("chat")
print("by a head:", session.say("Who are you?").text)
print("unknown head:", refused(firebox.FireboxError.NoHead, lambda: session.use_head("nobody")))
print("too hot:", refused(firebox.FireboxError.InvalidArgument, lambda: session.sample(-1.0)))
print("no model:", "nothing" in refused(firebox.FireboxError.Model, lambda: firebox.Model.open("there/is/nothing")))
