/* Talks to a model through every function of firebox.h, and writes what comes of it, a line for each. */

#include "firebox.h"

#include <stdio.h>
#include <string.h>

/* What a listener has heard. */
struct heard {
  const FireboxSession *session;
  size_t pieces;
  size_t most;
  FireboxStatus inside;
  char text[4096];
};

static int hear(const char *text, void *data) {
  struct heard *heard = data;
  strncat(heard->text, text, sizeof heard->text - strlen(heard->text) - 1);
  heard->inside = firebox_session_save(heard->session, "never-written");
  return ++heard->pieces == heard->most;
}

static int failed(const char *what, FireboxStatus status) {
  if (status == FIREBOX_STATUS_OK) {
    return 0;
  }
  fprintf(stderr, "%s: %d: %s\n", what, status, firebox_last_error());
  return 1;
}

static int say(const FireboxSession *session, const char *label, const char *text) {
  char *answer = NULL;
  if (failed(label, firebox_session_say(session, text, 0, NULL, NULL, &answer))) {
    return 1;
  }
  printf("%s: %s\n", label, answer);
  firebox_text_free(answer);
  return 0;
}

static void refused(const char *label, FireboxStatus status) {
  printf("%s: %d %s\n", label, status, firebox_last_error());
}

int main(int count, char **words) {
  if (count != 3) {
    fprintf(stderr, "say MODEL FILE\n");
    return 2;
  }
  FireboxModel *model = NULL;
  FireboxSession *session = NULL;
  char *answer = NULL;

  printf("no error yet: %d\n", firebox_last_error() == NULL);
  if (failed("open", firebox_model_open(words[1], 0, &model)) ||
      failed("new", firebox_session_new(model, NULL, &session))) {
    return 1;
  }

  struct heard heard = {.session = session};
  if (failed("say", firebox_session_say(session, "Who are you?", 0, hear, &heard, &answer))) {
    return 1;
  }
  printf("answer: %s\n", answer);
  printf("heard the same in several pieces: %d\n", strcmp(answer, heard.text) == 0 && heard.pieces > 1);
  printf("in its own callback: %d\n", heard.inside);
  firebox_text_free(answer);

  uint64_t dog = 0, newer = 0;
  if (failed("fact", firebox_session_add_fact(session, "The user's dog is called Biscuit.", &dog)) ||
      say(session, "told", "What is my dog called?") ||
      failed("supersede",
             firebox_session_supersede_fact(session, dog, "The user's dog is called Pepper.", &newer))) {
    return 1;
  }
  if (failed("save", firebox_session_save(session, words[2])) ||
      say(session, "superseded", "What is my dog called?")) {
    return 1;
  }
  refused("superseded twice", firebox_session_supersede_fact(session, dog, "No.", NULL));

  struct heard stopped = {.session = session, .most = 1};
  if (failed("stop", firebox_session_say(session, "Who are you?", 0, hear, &stopped, &answer))) {
    return 1;
  }
  printf("stopped after a piece: %d\n", stopped.pieces == 1 && strcmp(answer, stopped.text) == 0);
  firebox_text_free(answer);

  if (failed("own head", firebox_session_use_head(session, "0")) ||
      failed("chat head", firebox_session_use_head(session, "chat")) ||
      say(session, "by a head", "Who are you?") ||
      failed("no head", firebox_session_use_head(session, NULL)) ||
      failed("sample", firebox_session_sample(session, 0.5f, 0.9f, 7)) ||
      failed("few", firebox_session_say(session, "Who are you?", 1, NULL, NULL, NULL))) {
    return 1;
  }
  refused("unknown head", firebox_session_use_head(session, "nobody"));
  refused("too hot", firebox_session_sample(session, -1.0f, 1.0f, 0));
  refused("NULL", firebox_session_say(NULL, "Hello", 0, NULL, NULL, NULL));
  refused("no text", firebox_session_say(session, NULL, 0, NULL, NULL, NULL));
  refused("not UTF-8", firebox_session_say(session, "\xff", 0, NULL, NULL, NULL));
  refused("nowhere", firebox_model_open(words[1], 0, NULL));
  FireboxModel *none = model;
  FireboxStatus status = firebox_model_open("there/is/nothing", 0, &none);
  printf("no model: %d %d\n", status, none == NULL);

  FireboxSession *restored = NULL;
  if (failed("restore", firebox_session_restore(model, words[2], &restored))) {
    return 1;
  }
  /* Sessions keep their model. */
  firebox_model_free(model);
  if (say(restored, "restored", "What is my dog called?")) {
    return 1;
  }
  firebox_session_free(restored);
  firebox_session_free(session);
  firebox_session_free(NULL);
  firebox_model_free(NULL);
  firebox_text_free(NULL);
  return 0;
}
