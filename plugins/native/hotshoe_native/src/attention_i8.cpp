#include "attention_worker.h"

template void hs::attend_pages<hs::PagesI8>(const AttentionArgs&, const Team&);
