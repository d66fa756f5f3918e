// Entry point: connects the parts, shows views on small screens, asks for the API key.

import { Api } from './api.js';
import { Chat } from './chat.js';
import { byId, element } from './dom.js';
import { Live } from './live.js';

const api = new Api(askForKey);
const live = new Live(api, showState);
new Chat(api);

function askForKey(error) {
  const isWrong = Boolean(api.key);
  if (byId('key-form').hidden) {
    byId('key-form').hidden = false;
    byId('key').focus();
  }
  byId('key-error').hidden = !isWrong;
  byId('key-error').textContent = isWrong ? error.message : '';
}

function showState(state, detail) {
  const status = byId('status');
  status.dataset.state = state;
  const text = state === 'ok' ? 'Connected' : detail.status === 401 ? 'Needs a key' : detail.message;
  if (byId('status-text').textContent !== text) byId('status-text').textContent = text;
  status.title = state === 'ok' ? '' : detail.message;
  byId('forget-key').hidden = !api.key || state !== 'ok';
  if (state !== 'ok') return;
  byId('key-form').hidden = true;
  if (byId('model').disabled) loadModels().catch((error) => showState('failed', error));
}

async function loadModels() {
  const { data } = await api.get('v1/models');
  byId('model').replaceChildren(...data.map(({ id }) => element('option', { textContent: id, value: id })));
  byId('model').disabled = false;
}

byId('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  api.key = byId('key').value;
  byId('key').value = '';
  live.start();
});
byId('forget-key').addEventListener('click', () => {
  api.key = null;
  live.start();
});

const tabs = [...document.querySelectorAll('[role=tab]')];

function select(tab) {
  for (const one of tabs) {
    one.setAttribute('aria-selected', one === tab);
    one.tabIndex = one === tab ? 0 : -1;
  }
  document.body.dataset.view = tab.getAttribute('aria-controls');
  tab.focus();
}

tabs.forEach((tab, index) => {
  tab.addEventListener('click', () => select(tab));
  tab.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(tabs.at((index + step) % tabs.length));
  });
});

live.start();
