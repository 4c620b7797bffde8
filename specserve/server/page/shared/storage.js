// Values in the browser's storage, as JSON.

// Return the value at a key; null if it is missing or unreadable.
export function take(key, storage = "localStorage") {
  try {
    return JSON.parse(window[storage].getItem(key));
  } catch {
    return null;
  }
}

// Return whether the browser stored the value.
export function put(key, value, storage = "localStorage") {
  try {
    window[storage].setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
