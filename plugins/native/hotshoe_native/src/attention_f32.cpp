#include "attention_worker.h"

template void hs::attend_pages<hs::PagesF32>(const AttentionArgs&, const Team&);
