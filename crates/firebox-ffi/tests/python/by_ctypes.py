"""Talks to a model through the C functions, as plain Python can: by_ctypes.py LIBRARY MODEL FILE."""

import ctypes
import sys

library, path, file = sys.argv[1:]
firebox = ctypes.CDLL(library)
firebox.firebox_last_error.restype = ctypes.c_char_p
Listener = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def call(name, *arguments):
    status = getattr(firebox, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: {status}: {firebox.firebox_last_error().decode()}")


def say(session, text):
    pieces = []

    @Listener
    def hear(piece, data):
        pieces.append(piece.decode())
        return 0

    answer = ctypes.c_char_p()
    call("firebox_session_say", session, text.encode(), ctypes.c_size_t(0), hear, None, ctypes.byref(answer))
    assert "".join(pieces) == answer.value.decode()
    firebox.firebox_text_free(answer)
    return "".join(pieces)


model, session, restored = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
call("firebox_model_open", path.encode(), ctypes.c_uint64(0), ctypes.byref(model))
call("firebox_session_new", model, None, ctypes.byref(session))
print("answer:", say(session, "Who are you?"))
fact = ctypes.c_uint64()
call("firebox_session_add_fact", session, b"The user's dog is called Biscuit.", ctypes.byref(fact))
call("firebox_session_supersede_fact", session, fact, b"The user's dog is called Pepper.", None)
call("firebox_session_save", session, file.encode())
call("firebox_session_restore", model, file.encode(), ctypes.byref(restored))
print("superseded:", say(session, "What is my dog called?"))
print("restored:", say(restored, "What is my dog called?"))
try:
    call("firebox_session_use_head", session, b"nobody")
except RuntimeError as error:
    print("unknown head:", error)
for session in (session, restored):
    firebox.firebox_session_free(session)
firebox.firebox_model_free(model)
