/* Firebox from C.
 *
 * Every function that can fail returns a status, and firebox_last_error says more. Texts are UTF-8 and end with a zero.
 * Models and sessions may be used from any thread; a session is in one call at a time, and refuses others as busy.
 *
 * cbindgen made this from src/c.rs. */

#ifndef FIREBOX_H
#define FIREBOX_H

#include <stddef.h>
#include <stdint.h>

/*
 What a call came to.
 */
typedef enum FireboxStatus {
  /*
   What was asked for.
   */
  FIREBOX_STATUS_OK = 0,
  /*
   An argument cannot be used: NULL, not UTF-8, or out of range.
   */
  FIREBOX_STATUS_INVALID_ARGUMENT = 1,
  /*
   The model is not there or cannot be opened.
   */
  FIREBOX_STATUS_MODEL = 2,
  /*
   There is no such head or fact.
   */
  FIREBOX_STATUS_NOT_FOUND = 3,
  /*
   There is no room for what was said or told.
   */
  FIREBOX_STATUS_FULL = 4,
  /*
   A session could not be saved or restored.
   */
  FIREBOX_STATUS_FILE = 5,
  /*
   The session is in another call.
   */
  FIREBOX_STATUS_BUSY = 6,
  /*
   The model could not be run.
   */
  FIREBOX_STATUS_FAILED = 7,
  /*
   The library failed in a way it should not. The session is lost.
   */
  FIREBOX_STATUS_PANICKED = 8,
} FireboxStatus;

/*
 An opened model. Its sessions keep it, so that it may be freed before them.
 */
typedef struct FireboxModel FireboxModel;

/*
 A conversation with a model.
 */
typedef struct FireboxSession FireboxSession;

/*
 Hears an answer piece by piece: a text, which is gone when the function returns, and what was passed along. Anything
 but 0 ends the answer, and what was said by then stays. It must return, and not jump or throw out of the call.
 */
typedef int (*FireboxListener)(const char *text, void *data);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Says why the last call of this thread that failed did so, or NULL if none has. The text is there until the next call of
 this thread fails, and must not be freed.
 */
const char *firebox_last_error(void);

/*
 Opens a Hugging Face directory, a GGUF file or a bundle; the pocket model where the path is NULL. With an amount of
 memory in bytes the whole process takes no more, and the model is read from disk while it runs as far as it has to; 0 is
 no limit.

 # Safety
 `path` is NULL or a text, and `model` is NULL or can be written to.
 */
enum FireboxStatus firebox_model_open(const char *path,
                                      uint64_t memory,
                                      struct FireboxModel **model);

/*
 Frees a model; NULL is nothing.

 # Safety
 `model` is NULL or from `firebox_model_open`, is not in use by another thread, and is not used again.
 */
void firebox_model_free(struct FireboxModel *model);

/*
 Begins a conversation with what the model is to be, or NULL for nothing.

 # Safety
 `model` is NULL or a model, `system` is NULL or a text, and `session` is NULL or can be written to.
 */
enum FireboxStatus firebox_session_new(const struct FireboxModel *model,
                                       const char *system,
                                       struct FireboxSession **session);

/*
 Goes on with a conversation that was saved with the same model.

 # Safety
 `model` is NULL or a model, `path` is NULL or a text, and `session` is NULL or can be written to.
 */
enum FireboxStatus firebox_session_restore(const struct FireboxModel *model,
                                           const char *path,
                                           struct FireboxSession **session);

/*
 Frees a session; NULL is nothing.

 # Safety
 `session` is NULL or from `firebox_session_new` or `firebox_session_restore`, is not in use by another thread, and is not
 used again.
 */
void firebox_session_free(struct FireboxSession *session);

/*
 Says something, and has a function hear the answer with `data` passed along, or none where it is NULL. The answer has so
 many tokens at most; 0 is as many as fit. The whole of it is put into `answer`, to be freed by `firebox_text_free`, if
 that is not NULL.

 # Safety
 `session` is NULL or a session, `text` is NULL or a text, `listener` is NULL or does what `FireboxListener` says with
 `data`, and `answer` is NULL or can be written to.
 */
enum FireboxStatus firebox_session_say(const struct FireboxSession *session,
                                       const char *text,
                                       size_t max_tokens,
                                       FireboxListener listener,
                                       void *data,
                                       char **answer);

/*
 Frees a text that a call has put somewhere; NULL is nothing.

 # Safety
 `text` is NULL or from `firebox_session_say`, and is not used again.
 */
void firebox_text_free(char *text);

/*
 Says how tokens of later answers are chosen. A temperature of 0, as at first, takes the likeliest; 1 for `top_p` leaves
 none out.

 # Safety
 `session` is NULL or a session.
 */
enum FireboxStatus firebox_session_sample(const struct FireboxSession *session,
                                          float temperature,
                                          float top_p,
                                          uint64_t seed);

/*
 Answers with a head from now on; "0" is the model's own. NULL leaves the choice to the model's router, if it has one,
 as at first.

 # Safety
 `session` is NULL or a session, and `name` is NULL or a text.
 */
enum FireboxStatus firebox_session_use_head(const struct FireboxSession *session,
                                            const char *name);

/*
 Tells something that stays when turns are forgotten. What supersedes it is told the number that is put into `fact`, if
 that is not NULL.

 # Safety
 `session` is NULL or a session, `text` is NULL or a text, and `fact` is NULL or can be written to.
 */
enum FireboxStatus firebox_session_add_fact(const struct FireboxSession *session,
                                            const char *text,
                                            uint64_t *fact);

/*
 Puts a fact in the place of another, which later answers do not see. Its own number is put into `newer`, if that is not
 NULL.

 # Safety
 `session` is NULL or a session, `text` is NULL or a text, and `newer` is NULL or can be written to.
 */
enum FireboxStatus firebox_session_supersede_fact(const struct FireboxSession *session,
                                                  uint64_t fact,
                                                  const char *text,
                                                  uint64_t *newer);

/*
 Writes a session to a file, in the place of the one that may be there.

 # Safety
 `session` is NULL or a session, and `path` is NULL or a text.
 */
enum FireboxStatus firebox_session_save(const struct FireboxSession *session, const char *path);

#ifdef __cplusplus
} // extern "C"
#endif // __cplusplus

#endif /* FIREBOX_H */
