#include "firebox.h"

#include <stdio.h>

static int hear(const char *text, void *data) {
  (void)data;
  fputs(text, stdout);
  return 0;
}

int main(void) {
  FireboxModel *model;
  FireboxSession *session;
  uint64_t dog;

  if (firebox_model_open(NULL, 0, &model) || firebox_session_new(model, NULL, &session) ||
      firebox_session_add_fact(session, "The user's dog is called Biscuit.", &dog) ||
      firebox_session_say(session, "What is my dog called?", 0, hear, NULL, NULL)) {
    fprintf(stderr, "%s\n", firebox_last_error());
    return 1;
  }
  puts("");
  firebox_session_free(session);
  firebox_model_free(model);
  return 0;
}
