//! As much of HTTP as these servers need: where a head ends, and which object its path names.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};

/// Room for a head, bytes.
pub(super) const ROOM_BYTES: usize = 4096;
const END: &[u8] = b"\r\n\r\n";

/// The object that the first request of `received` asks for, and how many bytes its head has; `None` while that is not
/// whole.
///
/// # Errors
/// Its path does not end with a number.
pub(super) fn asked(received: &[u8]) -> Result<Option<(u64, usize)>> {
    let Some(end) = received.windows(END.len()).position(|window| window == END) else { return Ok(None) };
    let path = received[..end].split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    let digits = path.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let number =
        std::str::from_utf8(&path[path.len() - digits..]).ok().and_then(|digits| digits.parse().ok());
    let number = number.with_context(|| format!("no number: {}", String::from_utf8_lossy(path)))?;
    Ok(Some((number, end + END.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_whole_or_nothing_and_names_a_number() {
        let head = b"GET /engines/piece-00000012 HTTP/1.1\r\nHost: a\r\n\r\n";
        for len in 0..head.len() {
            assert_eq!(asked(&head[..len]).expect("good so far"), None);
        }
        assert_eq!(asked(head).expect("good"), Some((12, head.len())));
        let two = [&head[..], b"GET"].concat();
        assert_eq!(asked(&two).expect("good"), Some((12, head.len())));
        assert!(asked(b"GET /engines/piece HTTP/1.1\r\n\r\n").is_err());
        assert!(asked(b"\r\n\r\n").is_err());
    }
}
