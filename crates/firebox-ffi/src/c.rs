//! The C interface, declared in `include/firebox.h`.
//!
//! Every function that can fail returns a status, and [`firebox_last_error`] says more. Texts are UTF-8 and
//! zero-terminated. Models and sessions may be used from any thread; a session serves one call at a time and
//! rejects others as busy.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use crate::conversation::{Conversation, Sampling};
use crate::error::FireboxError;
use crate::open_model::OpenModel;
use crate::shared_conversation::SharedConversation;

/// An opened model. Its sessions keep it alive, so it may be freed before them.
#[derive(Debug)]
pub struct FireboxModel(Arc<OpenModel>);

/// A conversation with a model.
#[derive(Debug)]
pub struct FireboxSession(Arc<SharedConversation>);

/// The result of a call.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FireboxStatus {
    /// Success.
    Ok = 0,
    /// An argument is invalid: NULL, not UTF-8, or out of range.
    InvalidArgument = 1,
    /// The model does not exist or cannot be opened.
    Model = 2,
    /// The head or the fact does not exist.
    NotFound = 3,
    /// The session has no room for the text.
    Full = 4,
    /// A session could not be saved or restored.
    File = 5,
    /// The session is in use by another call.
    Busy = 6,
    /// Running the model failed.
    Failed = 7,
    /// The library panicked. The session is lost.
    Panicked = 8,
}

/// Receives an answer piece by piece: a text, valid until the function returns, and the data passed along. Any
/// result but 0 ends the answer, and the text so far stays. The function must return, and not jump or throw out
/// of the call.
pub type FireboxListener = Option<unsafe extern "C" fn(text: *const c_char, data: *mut c_void) -> c_int>;

thread_local! {
    static LAST_ERROR: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Returns why the last failed call of this thread failed, or NULL if none has. The text is valid until the
/// next call of this thread fails, and must not be freed.
#[unsafe(no_mangle)]
pub extern "C" fn firebox_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|error| error.as_ref().map_or(ptr::null(), |error| error.as_ptr()))
}

/// Opens a Hugging Face directory, a GGUF file or a bundle, or the pocket model if the path is NULL. `memory`
/// limits the bytes of the whole process, and the model is then streamed from disk as far as necessary; 0 means
/// no limit.
///
/// # Safety
/// `path` is NULL or a text, and `model` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_model_open(
    path: *const c_char,
    memory: u64,
    model: *mut *mut FireboxModel,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a writable pointer.
        let mut output = unsafe { OutputParam::new(model, "model") }?;
        // SAFETY: the caller passes NULL or a text.
        let path = unsafe { optional_text(path, "path") }?;
        let opened = OpenModel::open(path.map(Path::new), (memory > 0).then_some(memory))?;
        output.set(Box::into_raw(Box::new(FireboxModel(Arc::new(opened)))));
        Ok(())
    })
}

/// Frees a model. NULL is ignored.
///
/// # Safety
/// `model` is NULL or from `firebox_model_open`, is not in use by another thread, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_model_free(model: *mut FireboxModel) {
    // SAFETY: the caller passes NULL or a pointer from `Box::into_raw`, once.
    unsafe { free(model) }
}

/// Creates a session with a system prompt, or NULL for none.
///
/// # Safety
/// `model` is NULL or a model, `system` is NULL or a text, and `session` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_new(
    model: *const FireboxModel,
    system: *const c_char,
    session: *mut *mut FireboxSession,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a writable pointer.
        let mut output = unsafe { OutputParam::new(session, "session") }?;
        // SAFETY: the caller passes NULL or a model that is not freed during the call.
        let model = unsafe { reference(model, "model") }?;
        // SAFETY: the caller passes NULL or a text.
        let system = unsafe { optional_text(system, "system") }?;
        output.set(into_handle(Conversation::begin(model.0.clone(), system)?));
        Ok(())
    })
}

/// Restores a session that was saved with the same model.
///
/// # Safety
/// `model` is NULL or a model, `path` is NULL or a text, and `session` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_restore(
    model: *const FireboxModel,
    path: *const c_char,
    session: *mut *mut FireboxSession,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a writable pointer.
        let mut output = unsafe { OutputParam::new(session, "session") }?;
        // SAFETY: the caller passes NULL or a model that is not freed during the call.
        let model = unsafe { reference(model, "model") }?;
        // SAFETY: the caller passes NULL or a text.
        let path = unsafe { text(path, "path") }?;
        output.set(into_handle(Conversation::restore(model.0.clone(), Path::new(path))?));
        Ok(())
    })
}

/// Frees a session. NULL is ignored.
///
/// # Safety
/// `session` is NULL or from `firebox_session_new` or `firebox_session_restore`, is not in use by another
/// thread, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_free(session: *mut FireboxSession) {
    // SAFETY: the caller passes NULL or a pointer from `Box::into_raw`, once.
    unsafe { free(session) }
}

/// Sends a message and generates the answer. `listener`, unless NULL, receives the pieces of the answer with
/// `data`. `max_tokens` limits the answer; 0 means as many as fit. The whole answer is stored in `answer`,
/// unless that is NULL, and must be freed with `firebox_text_free`.
///
/// # Safety
/// `session` is NULL or a session, `text` is NULL or a text, `listener` is NULL or does what `FireboxListener`
/// says with `data`, and `answer` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_say(
    session: *const FireboxSession,
    text: *const c_char,
    max_tokens: usize,
    listener: FireboxListener,
    data: *mut c_void,
    answer: *mut *mut c_char,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a writable pointer.
        let mut output =
            (!answer.is_null()).then(|| unsafe { OutputParam::new(answer, "answer") }).transpose()?;
        // SAFETY: the caller passes NULL or a session that is not freed before it is cloned.
        let session = unsafe { reference(session, "session") }?.0.clone();
        // SAFETY: the caller passes NULL or a text.
        let text = unsafe { self::text(text, "text") }?;
        let mut heard = |piece: &str| {
            let Some(listener) = listener else { return Ok(true) };
            let piece = zero_ended(piece);
            // SAFETY: the caller passes a function that accepts a text and this data.
            Ok(unsafe { listener(piece.as_ptr(), data) } == 0)
        };
        let most = (max_tokens > 0).then_some(max_tokens);
        let said = session.with(|conversation| conversation.say(text, most, &mut heard))?;
        if let Some(output) = &mut output {
            output.set(zero_ended(&said.text).into_raw());
        }
        Ok(())
    })
}

/// Frees a text that a call returned. NULL is ignored.
///
/// # Safety
/// `text` is NULL or from `firebox_session_say`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller passes a pointer from `CString::into_raw`, once.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Sets the sampling of later answers. A temperature of 0, the default, is greedy; 1 for `top_p` keeps all
/// tokens.
///
/// # Safety
/// `session` is NULL or a session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_sample(
    session: *const FireboxSession,
    temperature: f32,
    top_p: f32,
    seed: u64,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a session that is not freed during the call.
        let session = unsafe { reference(session, "session") }?;
        session.0.with(|conversation| conversation.sample(Sampling { temperature, top_p, seed }))
    })
}

/// Selects the head of later answers; "0" is the model's own. NULL, the default, leaves the choice to the
/// model's router, if it has one.
///
/// # Safety
/// `session` is NULL or a session, and `name` is NULL or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_use_head(
    session: *const FireboxSession,
    name: *const c_char,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a session that is not freed during the call.
        let session = unsafe { reference(session, "session") }?;
        // SAFETY: the caller passes NULL or a text.
        let name = unsafe { optional_text(name, "name") }?;
        session.0.with(|conversation| conversation.use_head(name))
    })
}

/// Adds a fact, which is not evicted with turns. Its number, for superseding it, is stored in `fact` unless
/// that is NULL.
///
/// # Safety
/// `session` is NULL or a session, `text` is NULL or a text, and `fact` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_add_fact(
    session: *const FireboxSession,
    text: *const c_char,
    fact: *mut u64,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a session that is not freed during the call.
        let session = unsafe { reference(session, "session") }?;
        // SAFETY: the caller passes NULL or a text.
        let text = unsafe { self::text(text, "text") }?;
        let added = session.0.with(|conversation| conversation.add_fact(text))?;
        // SAFETY: the caller passes NULL or a writable pointer.
        unsafe { put_number(fact, added) };
        Ok(())
    })
}

/// Supersedes a fact, which later answers do not see. The number of the new fact is stored in `newer` unless
/// that is NULL.
///
/// # Safety
/// `session` is NULL or a session, `text` is NULL or a text, and `newer` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_supersede_fact(
    session: *const FireboxSession,
    fact: u64,
    text: *const c_char,
    newer: *mut u64,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a session that is not freed during the call.
        let session = unsafe { reference(session, "session") }?;
        // SAFETY: the caller passes NULL or a text.
        let text = unsafe { self::text(text, "text") }?;
        let added = session.0.with(|conversation| conversation.supersede_fact(fact, text))?;
        // SAFETY: the caller passes NULL or a writable pointer.
        unsafe { put_number(newer, added) };
        Ok(())
    })
}

/// Saves a session to a file, replacing an existing one.
///
/// # Safety
/// `session` is NULL or a session, and `path` is NULL or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_save(
    session: *const FireboxSession,
    path: *const c_char,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a session that is not freed during the call.
        let session = unsafe { reference(session, "session") }?;
        // SAFETY: the caller passes NULL or a text.
        let path = unsafe { text(path, "path") }?;
        session.0.with(|conversation| conversation.save(Path::new(path)))
    })
}

/// Runs a call and records its error. Panics do not unwind into the caller.
fn guarded(act: impl FnOnce() -> Result<(), FireboxError>) -> FireboxStatus {
    // A session that a panic left inconsistent rejects later calls.
    let done = catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| Err(panicked(&*panic)));
    let Err(error) = done else { return FireboxStatus::Ok };
    let status = status(&error);
    let text = zero_ended(&error.to_string());
    LAST_ERROR.with_borrow_mut(|last| *last = Some(text));
    status
}

fn panicked(panic: &(dyn Any + Send)) -> FireboxError {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    FireboxError::Panicked { reason: text.unwrap_or("no message").to_owned() }
}

fn status(error: &FireboxError) -> FireboxStatus {
    match error {
        FireboxError::InvalidArgument { .. } => FireboxStatus::InvalidArgument,
        FireboxError::Model { .. } => FireboxStatus::Model,
        FireboxError::NoHead { .. } | FireboxError::NoFact { .. } => FireboxStatus::NotFound,
        FireboxError::Full { .. } => FireboxStatus::Full,
        FireboxError::File { .. } | FireboxError::ForeignFile { .. } => FireboxStatus::File,
        FireboxError::Busy => FireboxStatus::Busy,
        FireboxError::Failed { .. } | FireboxError::Listener { .. } => FireboxStatus::Failed,
        FireboxError::Panicked { .. } => FireboxStatus::Panicked,
    }
}

/// Converts a text to C. A zero inside becomes U+FFFD.
fn zero_ended(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

fn into_handle(conversation: Conversation) -> *mut FireboxSession {
    Box::into_raw(Box::new(FireboxSession(Arc::new(SharedConversation::new(conversation)))))
}

/// An output parameter. It is NULL until set, so that a caller who misses an error does not use an old value.
struct OutputParam<T>(*mut *mut T);

impl<T> OutputParam<T> {
    /// # Safety
    /// `output` is NULL or writable for as long as this value lives.
    unsafe fn new(output: *mut *mut T, argument: &'static str) -> Result<Self, FireboxError> {
        if output.is_null() {
            return Err(null(argument));
        }
        let mut output = Self(output);
        output.set(ptr::null_mut());
        Ok(output)
    }

    fn set(&mut self, made: *mut T) {
        // SAFETY: it is not NULL, and the caller of `new` guarantees that it is writable.
        unsafe { self.0.write(made) }
    }
}

fn null(argument: &'static str) -> FireboxError {
    FireboxError::InvalidArgument { argument, reason: "is NULL".into() }
}

/// # Safety
/// `thing` is NULL or points to a value that outlives the reference.
unsafe fn reference<'t, T>(thing: *const T, argument: &'static str) -> Result<&'t T, FireboxError> {
    // SAFETY: guaranteed by the caller.
    unsafe { thing.as_ref() }.ok_or_else(|| null(argument))
}

/// # Safety
/// `text` is NULL or zero-terminated, and stays unchanged while the reference lives.
unsafe fn optional_text<'t>(
    text: *const c_char,
    argument: &'static str,
) -> Result<Option<&'t str>, FireboxError> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it is not NULL, and the caller guarantees that it is zero-terminated and unchanged.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map(Some)
        .map_err(|error| FireboxError::InvalidArgument { argument, reason: format!("is not UTF-8: {error}") })
}

/// # Safety
/// As for [`optional_text`].
unsafe fn text<'t>(text: *const c_char, argument: &'static str) -> Result<&'t str, FireboxError> {
    // SAFETY: guaranteed by the caller.
    unsafe { optional_text(text, argument) }?.ok_or_else(|| null(argument))
}

/// # Safety
/// `output` is NULL or writable.
unsafe fn put_number(output: *mut u64, number: u64) {
    if !output.is_null() {
        // SAFETY: it is not NULL, and the caller guarantees that it is writable.
        unsafe { output.write(number) }
    }
}

/// # Safety
/// `thing` is NULL or from `Box::into_raw`, and is not used again.
unsafe fn free<T>(thing: *mut T) {
    if !thing.is_null() {
        // A panic while freeing has no caller to report to.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the caller guarantees that it is from `Box::into_raw` and not used again.
            drop(unsafe { Box::from_raw(thing) });
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(guarded(|| panic!("of {}", "zeros\0")), FireboxStatus::Panicked);
        // SAFETY: the last error is valid until the next.
        let said = unsafe { CStr::from_ptr(firebox_last_error()) }.to_str().unwrap();
        assert!(said.contains("of zeros\u{fffd}"), "{said}");
        assert_eq!(guarded(|| Ok(())), FireboxStatus::Ok);
    }

    #[test]
    fn a_session_that_panicked_rejects_calls() {
        let model = Arc::new(OpenModel::open(None, None).unwrap());
        let session = SharedConversation::new(Conversation::begin(model, None).unwrap());
        let status = guarded(|| session.with(|_| panic!("in the middle")));
        assert_eq!(status, FireboxStatus::Panicked);
        assert!(matches!(session.with(|_| Ok(())), Err(FireboxError::Panicked { .. })));
    }
}
