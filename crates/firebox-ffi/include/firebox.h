/* Firebox from C.
 *
 * Every function that can fail returns a status, and firebox_last_error says more. Texts are UTF-8 and zero-terminated.
 * Models and sessions may be used from any thread; a session serves one call at a time and rejects others as busy.
 *
 * Generated from src/c.rs by cbindgen. */

#ifndef FIREBOX_H
#define FIREBOX_H

#include <stddef.h>
#include <stdint.h>

/*
 The result of a call.
 */
typedef enum FireboxStatus {
  /*
   Success.
   */
  FIREBOX_STATUS_OK = 0,
  /*
   An argument is invalid: NULL, not UTF-8, or out of range.
   */
  FIREBOX_STATUS_INVALID_ARGUMENT = 1,
  /*
   The model does not exist or cannot be opened.
   */
  FIREBOX_STATUS_MODEL = 2,
  /*
   The head or the fact does not exist.
   */
  FIREBOX_STATUS_NOT_FOUND = 3,
  /*
   The session has no room for the text.
   */
  FIREBOX_STATUS_FULL = 4,
  /*
   A session could not be saved or restored.
   */
  FIREBOX_STATUS_FILE = 5,
  /*
   The session is in use by another call.
   */
  FIREBOX_STATUS_BUSY = 6,
  /*
   Running the model failed.
   */
  FIREBOX_STATUS_FAILED = 7,
  /*
   The library panicked. The session is lost.
   */
  FIREBOX_STATUS_PANICKED = 8,
} FireboxStatus;

/*
 An opened model. Its sessions keep it alive, so it may be freed before them.
 */
typedef struct FireboxModel FireboxModel;

/*
 A conversation with a model.
 */
typedef struct FireboxSession FireboxSession;

/*
 Receives an answer piece by piece: a text, valid until the function returns, and the data passed along. Any
 result but 0 ends the answer, and the text so far stays. The function must return, and not jump or throw out
 of the call.
 */
typedef int (*FireboxListener)(const char *text, void *data);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Returns why the last failed call of this thread failed, or NULL if none has. The text is valid until the
 next call of this thread fails, and must not be freed.
 */
const char *firebox_last_error(void);

/*
 Opens a Hugging Face directory, a GGUF file or a bundle, or the pocket model if the path is NULL. `memory`
 limits the bytes of the whole process, and the model is then streamed from disk as far as necessary; 0 means
 no limit.

 # Safety
 `path` is NULL or a text, and `model` is NULL or writable.
 */
enum FireboxStatus firebox_model_open(const char *path,
                                      uint64_t memory,
                                      struct FireboxModel **model);

/*
 Frees a model. NULL is ignored.

 # Safety
 `model` is NULL or from `firebox_model_open`, is not in use by another thread, and is not used again.
 */
void firebox_model_free(struct FireboxModel *model);

/*
 Creates a session with a system prompt, or NULL for none.

 # Safety
 `model` is NULL or a model, `system` is NULL or a text, and `session` is NULL or writable.
 */
enum FireboxStatus firebox_session_new(const struct FireboxModel *model,
                                       const char *system,
                                       struct FireboxSession **session);

/*
 Restores a session that was saved with the same model.

 # Safety
 `model` is NULL or a model, `path` is NULL or a text, and `session` is NULL or writable.
 */
enum FireboxStatus firebox_session_restore(const struct FireboxModel *model,
                                           const char *path,
                                           struct FireboxSession **session);

/*
 Frees a session. NULL is ignored.

 # Safety
 `session` is NULL or from `firebox_session_new` or `firebox_session_restore`, is not in use by another
 thread, and is not used again.
 */
void firebox_session_free(struct FireboxSession *session);

/*
 Sends a message and generates the answer. `listener`, unless NULL, receives the pieces of the answer with
 `data`. `max_tokens` limits the answer; 0 means as many as fit. The whole answer is stored in `answer`,
 unless that is NULL, and must be freed with `firebox_text_free`.

 # Safety
 `session` is NULL or a session, `text` is NULL or a text, `listener` is NULL or does what `FireboxListener`
 says with `data`, and `answer` is NULL or writable.
 */
enum FireboxStatus firebox_session_say(const struct FireboxSession *session,
                                       const char *text,
                                       size_t max_tokens,
                                       FireboxListener listener,
                                       void *data,
                                       char **answer);

/*
 Frees a text that a call returned. NULL is ignored.

 # Safety
 `text` is NULL or from `firebox_session_say`, and is not used again.
 */
void firebox_text_free(char *text);

/*
 Sets the sampling of later answers. A temperature of 0, the default, is greedy; 1 for `top_p` keeps all
 tokens.

 # Safety
 `session` is NULL or a session.
 */
enum FireboxStatus firebox_session_sample(const struct FireboxSession *session,
                                          float temperature,
                                          float top_p,
                                          uint64_t seed);

/*
 Selects the head of later answers; "0" is the model's own. NULL, the default, leaves the choice to the
 model's router, if it has one.

 # Safety
 `session` is NULL or a session, and `name` is NULL or a text.
 */
enum FireboxStatus firebox_session_use_head(const struct FireboxSession *session,
                                            const char *name);

/*
 Adds a fact, which is not evicted with turns. Its number, for superseding it, is stored in `fact` unless
 that is NULL.

 # Safety
 `session` is NULL or a session, `text` is NULL or a text, and `fact` is NULL or writable.
 */
enum FireboxStatus firebox_session_add_fact(const struct FireboxSession *session,
                                            const char *text,
                                            uint64_t *fact);

/*
 Supersedes a fact, which later answers do not see. The number of the new fact is stored in `newer` unless
 that is NULL.

 # Safety
 `session` is NULL or a session, `text` is NULL or a text, and `newer` is NULL or writable.
 */
enum FireboxStatus firebox_session_supersede_fact(const struct FireboxSession *session,
                                                  uint64_t fact,
                                                  const char *text,
                                                  uint64_t *newer);

/*
 Saves a session to a file, replacing an existing one.

 # Safety
 `session` is NULL or a session, and `path` is NULL or a text.
 */
enum FireboxStatus firebox_session_save(const struct FireboxSession *session, const char *path);

#ifdef __cplusplus
} // extern "C"
#endif // __cplusplus

#endif /* FIREBOX_H */
