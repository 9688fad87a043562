//! What C has; `include/firebox.h` declares it.
//!
//! Every function that can fail returns a status, and [`firebox_last_error`] says more. Texts are UTF-8 and end with a
//! zero. Models and sessions may be used from any thread; a session is in one call at a time, and refuses others as busy.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use crate::FireboxError;
use crate::conversation::{Conversation, Sampling};
use crate::held::Held;
use crate::opened::Opened;

/// An opened model. Its sessions keep it, so that it may be freed before them.
#[derive(Debug)]
pub struct FireboxModel(Arc<Opened>);

/// A conversation with a model.
#[derive(Debug)]
pub struct FireboxSession(Arc<Held>);

/// What a call came to.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FireboxStatus {
    /// What was asked for.
    Ok = 0,
    /// An argument cannot be used: NULL, not UTF-8, or out of range.
    InvalidArgument = 1,
    /// The model is not there or cannot be opened.
    Model = 2,
    /// There is no such head or fact.
    NotFound = 3,
    /// There is no room for what was said or told.
    Full = 4,
    /// A session could not be saved or restored.
    File = 5,
    /// The session is in another call.
    Busy = 6,
    /// The model could not be run.
    Failed = 7,
    /// The library failed in a way it should not. The session is lost.
    Panicked = 8,
}

/// Hears an answer piece by piece: a text, which is gone when the function returns, and what was passed along. Anything
/// but 0 ends the answer, and what was said by then stays. It must return, and not jump or throw out of the call.
pub type FireboxListener = Option<unsafe extern "C" fn(text: *const c_char, data: *mut c_void) -> c_int>;

thread_local! {
    static LAST_ERROR: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Says why the last call of this thread that failed did so, or NULL if none has. The text is there until the next call of
/// this thread fails, and must not be freed.
#[unsafe(no_mangle)]
pub extern "C" fn firebox_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|error| error.as_ref().map_or(ptr::null(), |error| error.as_ptr()))
}

/// Opens a Hugging Face directory, a GGUF file or a bundle; the pocket model where the path is NULL. With an amount of
/// memory in bytes the whole process takes no more, and the model is read from disk while it runs as far as it has to; 0 is
/// no limit.
///
/// # Safety
/// `path` is NULL or a text, and `model` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_model_open(
    path: *const c_char,
    memory: u64,
    model: *mut *mut FireboxModel,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or what can be written to.
        let mut place = unsafe { Place::new(model, "model") }?;
        // SAFETY: the caller passes NULL or a text.
        let path = unsafe { optional_text(path, "path") }?;
        let opened = Opened::open(path.map(Path::new), (memory > 0).then_some(memory))?;
        place.put(Box::into_raw(Box::new(FireboxModel(Arc::new(opened)))));
        Ok(())
    })
}

/// Frees a model; NULL is nothing.
///
/// # Safety
/// `model` is NULL or from `firebox_model_open`, is not in use by another thread, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_model_free(model: *mut FireboxModel) {
    // SAFETY: the caller passes NULL or what a box was made into, once.
    unsafe { free(model) }
}

/// Begins a conversation with what the model is to be, or NULL for nothing.
///
/// # Safety
/// `model` is NULL or a model, `system` is NULL or a text, and `session` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_new(
    model: *const FireboxModel,
    system: *const c_char,
    session: *mut *mut FireboxSession,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or what can be written to.
        let mut place = unsafe { Place::new(session, "session") }?;
        // SAFETY: the caller passes NULL or a model that is not freed during the call.
        let model = unsafe { there(model, "model") }?;
        // SAFETY: the caller passes NULL or a text.
        let system = unsafe { optional_text(system, "system") }?;
        place.put(held(Conversation::begin(model.0.clone(), system)?));
        Ok(())
    })
}

/// Goes on with a conversation that was saved with the same model.
///
/// # Safety
/// `model` is NULL or a model, `path` is NULL or a text, and `session` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_restore(
    model: *const FireboxModel,
    path: *const c_char,
    session: *mut *mut FireboxSession,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or what can be written to.
        let mut place = unsafe { Place::new(session, "session") }?;
        // SAFETY: the caller passes NULL or a model that is not freed during the call.
        let model = unsafe { there(model, "model") }?;
        // SAFETY: the caller passes NULL or a text.
        let path = unsafe { text(path, "path") }?;
        place.put(held(Conversation::restore(model.0.clone(), Path::new(path))?));
        Ok(())
    })
}

/// Frees a session; NULL is nothing.
///
/// # Safety
/// `session` is NULL or from `firebox_session_new` or `firebox_session_restore`, is not in use by another thread, and is not
/// used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_free(session: *mut FireboxSession) {
    // SAFETY: the caller passes NULL or what a box was made into, once.
    unsafe { free(session) }
}

/// Says something, and has a function hear the answer with `data` passed along, or none where it is NULL. The answer has so
/// many tokens at most; 0 is as many as fit. The whole of it is put into `answer`, to be freed by `firebox_text_free`, if
/// that is not NULL.
///
/// # Safety
/// `session` is NULL or a session, `text` is NULL or a text, `listener` is NULL or does what `FireboxListener` says with
/// `data`, and `answer` is NULL or can be written to.
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
        // SAFETY: the caller passes NULL or what can be written to.
        let mut place = (!answer.is_null()).then(|| unsafe { Place::new(answer, "answer") }).transpose()?;
        // SAFETY: the caller passes NULL or a session that is not freed before it is cloned.
        let session = unsafe { there(session, "session") }?.0.clone();
        // SAFETY: the caller passes NULL or a text.
        let text = unsafe { self::text(text, "text") }?;
        let mut heard = |piece: &str| {
            let Some(listener) = listener else { return Ok(true) };
            let piece = zero_ended(piece);
            // SAFETY: the caller passes a function that may be called with a text and this data.
            Ok(unsafe { listener(piece.as_ptr(), data) } == 0)
        };
        let most = (max_tokens > 0).then_some(max_tokens);
        let said = session.with(|conversation| conversation.say(text, most, &mut heard))?;
        if let Some(place) = &mut place {
            place.put(zero_ended(&said.text).into_raw());
        }
        Ok(())
    })
}

/// Frees a text that a call has put somewhere; NULL is nothing.
///
/// # Safety
/// `text` is NULL or from `firebox_session_say`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller passes what `CString::into_raw` has given, once.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Says how tokens of later answers are chosen. A temperature of 0, as at first, takes the likeliest; 1 for `top_p` leaves
/// none out.
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
        let session = unsafe { there(session, "session") }?;
        session.0.with(|conversation| conversation.sample(Sampling { temperature, top_p, seed }))
    })
}

/// Answers with a head from now on; "0" is the model's own. NULL leaves the choice to the model's router, if it has one,
/// as at first.
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
        let session = unsafe { there(session, "session") }?;
        // SAFETY: the caller passes NULL or a text.
        let name = unsafe { optional_text(name, "name") }?;
        session.0.with(|conversation| conversation.use_head(name))
    })
}

/// Tells something that stays when turns are forgotten. What supersedes it is told the number that is put into `fact`, if
/// that is not NULL.
///
/// # Safety
/// `session` is NULL or a session, `text` is NULL or a text, and `fact` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_add_fact(
    session: *const FireboxSession,
    text: *const c_char,
    fact: *mut u64,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a session that is not freed during the call.
        let session = unsafe { there(session, "session") }?;
        // SAFETY: the caller passes NULL or a text.
        let text = unsafe { self::text(text, "text") }?;
        let added = session.0.with(|conversation| conversation.add_fact(text))?;
        // SAFETY: the caller passes NULL or what can be written to.
        unsafe { put_number(fact, added) };
        Ok(())
    })
}

/// Puts a fact in the place of another, which later answers do not see. Its own number is put into `newer`, if that is not
/// NULL.
///
/// # Safety
/// `session` is NULL or a session, `text` is NULL or a text, and `newer` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firebox_session_supersede_fact(
    session: *const FireboxSession,
    fact: u64,
    text: *const c_char,
    newer: *mut u64,
) -> FireboxStatus {
    guarded(|| {
        // SAFETY: the caller passes NULL or a session that is not freed during the call.
        let session = unsafe { there(session, "session") }?;
        // SAFETY: the caller passes NULL or a text.
        let text = unsafe { self::text(text, "text") }?;
        let added = session.0.with(|conversation| conversation.supersede_fact(fact, text))?;
        // SAFETY: the caller passes NULL or what can be written to.
        unsafe { put_number(newer, added) };
        Ok(())
    })
}

/// Writes a session to a file, in the place of the one that may be there.
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
        let session = unsafe { there(session, "session") }?;
        // SAFETY: the caller passes NULL or a text.
        let path = unsafe { text(path, "path") }?;
        session.0.with(|conversation| conversation.save(Path::new(path)))
    })
}

/// Does something, and keeps why it failed. Nothing unwinds into who has called.
fn guarded(act: impl FnOnce() -> Result<(), FireboxError>) -> FireboxStatus {
    // A session that a panic has left unfinished refuses to be used again.
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
    FireboxError::Panicked { reason: text.unwrap_or("it does not say why").to_owned() }
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

/// As C has texts, which end at the first zero: one inside is written as what stands for what cannot be written.
fn zero_ended(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

fn held(conversation: Conversation) -> *mut FireboxSession {
    Box::into_raw(Box::new(FireboxSession(Arc::new(Held::new(conversation)))))
}

/// Where a call puts what it has made. Until then NULL is there, so that who overlooks an error does not use what was there
/// before.
struct Place<T>(*mut *mut T);

impl<T> Place<T> {
    /// # Safety
    /// `place` is NULL or can be written to for as long as this lives.
    unsafe fn new(place: *mut *mut T, argument: &'static str) -> Result<Self, FireboxError> {
        if place.is_null() {
            return Err(null(argument));
        }
        let mut place = Self(place);
        place.put(ptr::null_mut());
        Ok(place)
    }

    fn put(&mut self, made: *mut T) {
        // SAFETY: it is not NULL, and whoever made this has said that it can be written to.
        unsafe { self.0.write(made) }
    }
}

fn null(argument: &'static str) -> FireboxError {
    FireboxError::InvalidArgument { argument, reason: "is NULL".into() }
}

/// # Safety
/// `thing` is NULL or points to one that lives as long as the reference.
unsafe fn there<'t, T>(thing: *const T, argument: &'static str) -> Result<&'t T, FireboxError> {
    // SAFETY: the caller says so.
    unsafe { thing.as_ref() }.ok_or_else(|| null(argument))
}

/// # Safety
/// `text` is NULL or ends with a zero, and stays as it is as long as the reference lives.
unsafe fn optional_text<'t>(
    text: *const c_char,
    argument: &'static str,
) -> Result<Option<&'t str>, FireboxError> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it is not NULL, and the caller says that it ends with a zero and stays.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map(Some)
        .map_err(|error| FireboxError::InvalidArgument { argument, reason: format!("is not UTF-8: {error}") })
}

/// # Safety
/// As for [`optional_text`].
unsafe fn text<'t>(text: *const c_char, argument: &'static str) -> Result<&'t str, FireboxError> {
    // SAFETY: the caller says so.
    unsafe { optional_text(text, argument) }?.ok_or_else(|| null(argument))
}

/// # Safety
/// `place` is NULL or can be written to.
unsafe fn put_number(place: *mut u64, number: u64) {
    if !place.is_null() {
        // SAFETY: it is not NULL, and the caller says that it can be written to.
        unsafe { place.write(number) }
    }
}

/// # Safety
/// `thing` is NULL or was made from a box, and is not used again.
unsafe fn free<T>(thing: *mut T) {
    if !thing.is_null() {
        // A panic while something is freed leaves nobody to tell.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the caller says that it was made from a box, and is not used again.
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
        // SAFETY: what the last error points to is there until the next.
        let said = unsafe { CStr::from_ptr(firebox_last_error()) }.to_str().unwrap();
        assert!(said.contains("of zeros\u{fffd}"), "{said}");
        assert_eq!(guarded(|| Ok(())), FireboxStatus::Ok);
    }

    #[test]
    fn a_session_that_panicked_refuses_to_go_on() {
        let model = Arc::new(Opened::open(None, None).unwrap());
        let session = Held::new(Conversation::begin(model, None).unwrap());
        let status = guarded(|| session.with(|_| panic!("in the middle")));
        assert_eq!(status, FireboxStatus::Panicked);
        assert!(matches!(session.with(|_| Ok(())), Err(FireboxError::Panicked { .. })));
    }
}
