//! Which head a message is for.

use firebox_runtime::Session;
use firebox_runtime::heads::Router;

use crate::console::Console;

/// The name that leaves the choice to the router.
pub const AUTO: &str = "auto";

/// Switches a session to the head that a router chooses for the prompt that follows, and prints its name as a note.
pub fn choose(
    router: &Router,
    session: &mut Session,
    prompt: &[u32],
    console: &Console,
) -> anyhow::Result<()> {
    if let Some(chosen) = router.choose(session, prompt)? {
        let instead = session.use_head(&chosen).fallback_reason;
        console.note(instead.map_or_else(|| format!("({chosen})"), |reason| format!("({reason})")));
    }
    Ok(())
}
