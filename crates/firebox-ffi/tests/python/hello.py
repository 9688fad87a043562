import firebox_ffi as firebox


class Aloud(firebox.Listener):
    def heard(self, text):
        print(text, end="", flush=True)
        return True


session = firebox.Model.open().session()
dog = session.add_fact("The user's dog is called Biscuit.")
session.supersede_fact(dog, "The user's dog is called Pepper.")
session.say("What is my dog called?", Aloud())
print()
